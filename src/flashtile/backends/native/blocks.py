"""The blocks that the C++ core works by, for those who want to show them; a test reads its sources and pins them."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.backends.native import library
from flashtile.band import ceil_div
from flashtile.cost.tiling import Tiling
from flashtile.host import threads
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.problem import Problem


class Lanes(NamedTuple):
    """Vectors of so many bytes; so many of them hold a group of queries side by side; so many there are in all."""

    vector_bytes: int
    vectors: int
    registers: int

    @property
    def register_bytes(self) -> int:
        return self.vector_bytes * self.registers


LANES = {
    "x86-64-v4-bf16": Lanes(64, 3, 32),
    "x86-64-v4": Lanes(64, 3, 32),
    "x86-64-v3": Lanes(32, 3, 16),
    "aarch64": Lanes(16, 4, 32),
    "generic": Lanes(16, 3, 16),
}
FORWARD_KEYS = 192
DECODE_KEYS = 64
# Groups of queries in one task of a forward pass: they share a block of keys while it is in L2.
MAX_GROUPS = 8
L2_SHARE = 96 << 10  # bytes for their q and O
MIN_SPLIT, ENOUGH_TASKS = 1024, 32  # with few tasks the keys are split instead, and a task is one group


def tile(problem: Problem, capability: object = None, isa: str | None = None) -> Tiling:
    """What a task loads a block of keys for. Scores are made for one group of queries at a time."""
    p, lanes = problem, LANES[isa or library.isa()]
    wide = lanes.vector_bytes // ITEMSIZE[p.accumulator]  # numbers in a vector
    # Few queries to a key head: vectors run along the head dim, and one pass over the keys serves several heads.
    if p.n_q <= wide // 4 or p.group * p.n_q <= wide:
        return Tiling(max(p.n_q, 1), DECODE_KEYS, max(1, min(wide // max(p.n_q, 1), p.group)))
    each = lanes.vectors * wide
    heads, groups = p.sequences * p.heads, ceil_div(p.n_q, each)
    together = min(max(L2_SHARE // (each * (p.dim + p.dim_v) * ITEMSIZE[p.accumulator]), 1), MAX_GROUPS)
    if heads * groups < ENOUGH_TASKS and p.n_k >= 2 * MIN_SPLIT:
        together = 1
    while together > 1 and heads * ceil_div(groups, together) < 4 * (p.threads or threads.default()):
        together -= 1
    return Tiling(together * each, FORWARD_KEYS, at_once=each)
