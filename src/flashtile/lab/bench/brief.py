"""Briefs: a record in one small table, for the README: how many times as fast as each peer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashtile.lab.bench import markdown
from flashtile.lab.bench.gpu.measures import OVER_BEST
from flashtile.lab.bench.gpu.peers import NAMES, OURSELVES
from flashtile.lab.bench.gpu.rows import DTYPE, TRAIN
from flashtile.lab.bench.markdown import number
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.timing import geometric_mean

ON_A_CPU = ("full", "causal", "training", "training-causal", "bfloat16", "bfloat16-training", "decode-gqa", "small")
DIRECTIONS = {"forward": "forward", "backward": "backward", "step": "a training step"}

Row = dict[str, Any]


def cpu(*found: Record) -> str:
    """One row a group, of those that say most: from the least to the most that a record has."""
    rows = []
    for name in ON_A_CPU:
        group = [s for record in found for s in record["summary"] if s["group"] == name and s["value"]]
        if group:
            ends = [number(1 / of(s["value"] for s in group), 1) for of in (max, min)]
            rows.append((group[0]["title"], " to ".join(dict.fromkeys(ends))))
    return markdown.table([("on a CPU", "times as fast as torch's SDPA"), *rows]) if rows else ""


def gpu(record: Record) -> str:
    """One row a direction: means over the shapes that all peers ran, and the shape where the fastest is nearest."""
    measured = [row for row in record["measurements"] if row["suite"] == TRAIN and row["dtype"] == DTYPE]
    peers = [name for name in NAMES if name not in OURSELVES and any(name in row["ratios"] for row in measured)]
    rows = [
        (f"{title}, {_shapes(some)}", *(number(_mean(name, some)) for name in peers), number(_nearest(some), 3))
        for direction, title in DIRECTIONS.items()
        if (some := [row for row in measured if row["direction"] == direction and row["ratios"].keys() >= {*peers}])
    ]
    head = ("on a GPU, times as fast as", *peers, "the fastest peer, at worst")
    return markdown.table([head, *rows]) if rows and peers else ""


def _shapes(rows: list[Row]) -> str:
    return f"{len(rows)} shape{'s' if len(rows) > 1 else ''}"


def _mean(peer: str, rows: Iterable[Row]) -> float:
    return geometric_mean(row["ratios"][peer]["value"] for row in rows)


def _nearest(rows: Iterable[Row]) -> float | None:
    return min((x for row in rows if (x := OVER_BEST.of(row)) is not None), default=None)
