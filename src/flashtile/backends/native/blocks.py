"""The block sizes of the C++ core, for plan() and trace(); a test compares them with its sources."""

from typing import NamedTuple

from flashtile.backends.native import library
from flashtile.band import ceil_div
from flashtile.cost.tiling import Tiling
from flashtile.host import threads
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.problem import Problem


class Lanes(NamedTuple):
    """Bytes of a vector register, registers that hold a group of queries, and registers in all."""

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
# The most groups of queries in a task of the forward pass: they share a block of keys while it is in L2.
MAX_GROUPS = 8
L2_SHARE = 96 << 10  # bytes of L2 for their q and O
MIN_SPLIT, ENOUGH_TASKS = 1024, 32  # with few tasks keys are split, and a task is one group


def tile(problem: Problem, capability: object = None, isa: str | None = None) -> Tiling:
    """Return the queries of a task and its block of keys. Scores are computed for one group of queries at a time."""
    p, lanes = problem, LANES[isa or library.isa()]
    width = lanes.vector_bytes // ITEMSIZE[p.accumulator]  # numbers in a vector
    # Few queries per key head: vectors run along the head dim, and one pass over the keys serves several heads.
    if p.n_q <= width // 4 or p.group * p.n_q <= width:
        return Tiling(max(p.n_q, 1), DECODE_KEYS, max(1, min(width // max(p.n_q, 1), p.group)))
    group_size = lanes.vectors * width
    heads, groups = p.sequences * p.heads, ceil_div(p.n_q, group_size)
    groups_per_task = min(max(L2_SHARE // (group_size * (p.dim + p.dim_v) * ITEMSIZE[p.accumulator]), 1), MAX_GROUPS)
    if heads * groups < ENOUGH_TASKS and p.n_k >= 2 * MIN_SPLIT:
        groups_per_task = 1
    while groups_per_task > 1 and heads * ceil_div(groups, groups_per_task) < 4 * (p.threads or threads.default()):
        groups_per_task -= 1
    return Tiling(groups_per_task * group_size, FORWARD_KEYS, at_once=group_size)
