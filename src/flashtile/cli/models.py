"""Named models and chips, from the two data files beside this one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flashtile.dtypes import ITEMSIZE
from flashtile.plan import Rates


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of a transformer."""

    layers: int
    heads: int
    kv_heads: int
    dim: int

    def shapes(self, queries: int, context: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of q and of k, for one sequence and one layer."""
        return (1, self.heads, queries, self.dim), (1, self.kv_heads, context, self.dim)

    def kv_bytes_a_token(self, dtype: str) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.dim * ITEMSIZE[dtype]


@cache
def models() -> dict[str, Model]:
    return {name: Model(**values) for name, values in json.loads(_text("models.json")).items()}


@cache
def chips() -> dict[str, Rates]:
    """Dense 16-bit tensor rate and memory rate, by the datasheets."""
    return {name: Rates(**values) for name, values in json.loads(_text("chips.json")).items()}


def _text(name: str) -> str:
    return files("flashtile.cli").joinpath(name).read_text()


def length(text: str) -> int:
    """8192 for "8192" and "8k"; 1048576 for "1m"."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 0)
    digits = text[:-1] if factor else text
    if not digits.isdecimal():
        raise ValueError(f"expected a length such as 8192, 8k or 1m, got {text!r}")
    return int(digits) * (factor or 1)
