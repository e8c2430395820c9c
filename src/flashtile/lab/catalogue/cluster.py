"""Named clusters: their GPUs, and the links between them by published figures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flashtile.cost.parallel import Links


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of GPUs in the units of their datasheets. Rates are per GPU and direction."""

    name: str
    chip: str  # its name in chips.json
    node: int  # GPUs of a node
    inside_gb_s: float  # between the GPUs of a node
    across_gb_s: float  # between nodes

    @property
    def links(self) -> Links:
        return Links(self.node, self.inside_gb_s * 1e9, self.across_gb_s * 1e9)


@cache
def clusters() -> dict[str, Cluster]:
    text = files("flashtile.lab.catalogue").joinpath("clusters.json").read_text()
    return {name: Cluster(**values) for name, values in json.loads(text).items()}
