"""Named models: the shapes of their attention, and the size of their KV cache."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flashtile.numerics.dtypes import ITEMSIZE

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of a transformer. All layers have the same heads; some may be restricted to a window of keys."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    context: int  # the longest supported
    value_dim: int | None = None  # if it differs from that of keys
    local: int = 0  # layers whose queries see `window` keys, including their own
    window: int | None = None
    # Latent attention: a token has one vector of `latent` numbers, and `rope` more with its position, for all heads.
    # Keys and values of every head are made from it: for a prompt in memory, for one token on the fly.
    latent: int | None = None
    rope: int = 0

    @property
    def dim_v(self) -> int:
        return self.dim if self.value_dim is None else self.value_dim

    def shapes(self, queries: int, context: int) -> tuple[Shape, Shape]:
        """The shapes of q and k, for one sequence and one layer."""
        return (1, self.heads, queries, self.dim), (1, self.kv_heads, context, self.dim)

    def v_shape(self, context: int) -> Shape:
        return (1, self.kv_heads, context, self.dim_v)

    @property
    def cached_numbers(self) -> int:
        """Numbers in the KV cache per token and layer."""
        return self.kv_heads * (self.dim + self.dim_v) if self.latent is None else self.latent + self.rope

    def kv_bytes_a_token(self, dtype: str) -> int:
        """Keys and values of all layers, while no window is full."""
        return self.layers * self.cached_numbers * ITEMSIZE[dtype]

    def kv_bytes(self, context: int, dtype: str) -> int:
        """The KV cache of one sequence; a layer with a window keeps no more than its window."""
        kept = context if self.window is None else min(context, self.window)
        tokens = (self.layers - self.local) * context + self.local * kept
        return tokens * self.cached_numbers * ITEMSIZE[dtype]


@cache
def models() -> dict[str, Model]:
    text = files("flashtile.lab.catalogue").joinpath("models.json").read_text()
    return {name: Model(**values) for name, values in json.loads(text).items()}


def length(text: str) -> int:
    """Parse a length: 8192 for "8192" and "8k"; 1048576 for "1m"."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 0)
    digits = text[:-1] if factor else text
    if not digits.isdecimal():
        raise ValueError(f"expected a length such as 8192, 8k or 1m, got {text!r}")
    return int(digits) * (factor or 1)
