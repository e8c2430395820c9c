"""Named models: what their attention looks like, and what their KV cache takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flashtile.numerics.dtypes import ITEMSIZE

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of a transformer. All layers have the same heads; some may see a window of keys only."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    context: int  # the longest it was made for
    value_dim: int | None = None  # where values are not as wide as keys
    local: int = 0  # layers whose queries see `window` keys, their own among them
    window: int | None = None
    # Latent attention: a token leaves one vector of `latent` numbers and `rope` more that know its position, for all
    # heads together. Keys and values of every head are made from it: for a prompt in memory, for one token on the fly.
    latent: int | None = None
    rope: int = 0

    @property
    def dim_v(self) -> int:
        return self.dim if self.value_dim is None else self.value_dim

    def shapes(self, queries: int, context: int) -> tuple[Shape, Shape]:
        """Of q and of k, for one sequence and one layer."""
        return (1, self.heads, queries, self.dim), (1, self.kv_heads, context, self.dim)

    def v_shape(self, context: int) -> Shape:
        return (1, self.kv_heads, context, self.dim_v)

    @property
    def cached_numbers(self) -> int:
        """Of a token and a layer."""
        return self.kv_heads * (self.dim + self.dim_v) if self.latent is None else self.latent + self.rope

    def kv_bytes_a_token(self, dtype: str) -> int:
        """Keys and values of all layers, while every window still has room."""
        return self.layers * self.cached_numbers * ITEMSIZE[dtype]

    def kv_bytes(self, context: int, dtype: str) -> int:
        """The KV cache of one sequence; a layer with a window keeps no more than that."""
        kept = context if self.window is None else min(context, self.window)
        tokens = (self.layers - self.local) * context + self.local * kept
        return tokens * self.cached_numbers * ITEMSIZE[dtype]


@cache
def models() -> dict[str, Model]:
    text = files("flashtile.lab.catalogue").joinpath("models.json").read_text()
    return {name: Model(**values) for name, values in json.loads(text).items()}


def length(text: str) -> int:
    """8192 for "8192" and "8k"; 1048576 for "1m"."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 0)
    digits = text[:-1] if factor else text
    if not digits.isdecimal():
        raise ValueError(f"expected a length such as 8192, 8k or 1m, got {text!r}")
    return int(digits) * (factor or 1)
