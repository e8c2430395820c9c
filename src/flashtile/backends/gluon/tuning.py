"""Configs of the Hopper kernels by head dim, the order of tasks for the L2, and which tiles a band cuts.

Nothing is tuned at call time.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile.band import FAR
from flashtile.numerics import dtypes
from flashtile.problem import Problem

ROWS = 64  # of a warpgroup, as its matrix instruction requires


class Config(NamedTuple):
    """A tile of 64 rows for each of `consumers` warpgroups by block_k keys, with `stages` of them in flight.

    registers, load_registers: of a consumer thread and of a loader thread; together they use all of a processor's.
    """

    block_k: int
    stages: int
    consumers: int
    registers: int
    load_registers: int
    # Parts in which O is stored, through a buffer of 1/out_parts of its width; 2 only over head dim 128.
    out_parts: int = 1
    weights_shared: bool = False  # 8 bits: P waits for its values in shared memory, not in registers


class BackwardConfig(NamedTuple):
    """Tiles of block_q queries in the backward kernels, for tasks of `keys` keys. dq_buffers: of each warpgroup.

    scores_first: issue the scores of the next tile before dQ of this one is stored, and fence dS before the products.
    Over head dim 128 this is always the case.
    """

    block_q: int
    keys: int
    dout_stages: int
    dq_buffers: int
    scores_first: bool


FORWARD = {64: Config(128, 3, 3, 160, 32), 128: Config(128, 2, 2, 240, 32), 256: Config(64, 2, 2, 240, 32, out_parts=2)}
EIGHT_BITS = {
    64: Config(128, 3, 3, 160, 32),
    128: Config(128, 3, 3, 160, 32, weights_shared=True),
    256: Config(128, 2, 2, 240, 32, out_parts=2, weights_shared=True),
}
# One warpgroup less, for heads whose few rows would leave much of three empty. By bytes per element and head dim.
TWO_WARPGROUP_CASES = {(2, 64), (1, 64), (1, 128)}
TWO_WARPGROUPS = Config(128, 3, 2, 240, 32)
MIN_PADDING_RATIO = 1.25  # two warpgroups pay if the tiles of three have at least this many times their rows
BACKWARD = {
    64: BackwardConfig(128, 128, 2, 2, scores_first=True),
    128: BackwardConfig(64, 128, 2, 2, scores_first=False),
    256: BackwardConfig(64, 64, 1, 1, scores_first=True),
}
WIDEST_BACKWARD = max(BACKWARD)
L2_SECTION = 16 << 20  # bytes of keys and values in use at a time; each half of the L2 has its own copy
WAVES = 2  # tasks of the backward pass per processor whose heads run side by side
PACKED_WAVES = 4  # for packed sequences, the longest of which may come last
MAX_PROCESSORS = 132  # of a Hopper GPU
MAX_PACKED = 16  # query heads that share the rows of a tile


def section(problem: Problem, tiles: int, heads: int, processors: int) -> int:
    """The number of heads of a backward pass that have WAVES tasks per processor; see find_key_tile().

    The order of sums depends on it: if it is fixed, it is that of the largest Hopper GPU on all of them.
    """
    p = problem
    waves, per_wave = (WAVES, MAX_PROCESSORS) if p.deterministic else (PACKED_WAVES if p.packed else WAVES, processors)
    return max(1, min(heads, -(-waves * per_wave // max(1, tiles))))


def packed_heads(problem: Problem) -> int:
    """The query heads of a group that share the rows of a tile, if one head would leave most of them empty."""
    p = problem
    if p.packed or p.group & (p.group - 1) or p.group > MAX_PACKED:
        return 1
    rows = ROWS * forward(max(p.dim, p.dim_v), p.dtype).consumers
    return p.group if p.n_q * 2 <= rows else 1


def forward(width: int, dtype: str = "bfloat16", rows: int | None = None) -> Config:
    """The Config for the larger head dim. rows: of a head, or of those that share tiles; None if lengths differ."""
    table = EIGHT_BITS if dtype == dtypes.EIGHT_BITS else FORWARD
    step = next(step for step in table if width <= step)
    config = table[step]
    if rows is None or (dtypes.ITEMSIZE[dtype], step) not in TWO_WARPGROUP_CASES:
        return config
    two = TWO_WARPGROUPS
    return two if _padded(rows, config) >= MIN_PADDING_RATIO * _padded(rows, two) else config


def forward_of(problem: Problem, packed_heads: int) -> Config:
    """forward() for a problem whose tiles hold rows of packed_heads heads."""
    p = problem
    config = forward(max(p.dim, p.dim_v), p.dtype, None if p.packed else p.n_q * packed_heads)
    return config if 2 * p.dim_v > max(FORWARD) else config._replace(out_parts=1)


def _padded(rows: int, config: Config) -> int:
    """The rows including those that tiles leave empty."""
    tile = ROWS * config.consumers
    return -(-rows // tile) * tile


def one_right_cut(problem: Problem) -> bool:
    """Whether only the last key tile of 64 rows is surely cut on the right, and every row sees some of it.

    The kernel for that case is leaner.
    """
    p = problem
    if p.band.right >= FAR:
        return p.band.left >= FAR
    if p.packed or p.kv_lengths is not None or packed_heads(p) > 1:
        return False
    return _diagonal(p) % ROWS == 0


def _diagonal(p: Problem) -> int:
    """The last key that the first query sees, if all keys are in use."""
    return p.band.right + (p.n_k - p.n_q if p.align_end else p.band.offset)


def always_cut(problem: Problem, same_starts: bool = False) -> int:
    """How many query tiles the diagonal cuts for each tile of keys, if the number is always the same; else 0.

    The last of them may be beyond the last query. same_starts: packed queries and keys begin at the same positions.
    """
    p, steps = problem, backward(max(problem.dim, problem.dim_v))
    if p.kv_lengths is not None or p.band.right >= FAR or p.band.left < FAR:
        return 0
    if p.packed:
        regular = same_starts and p.align_end and p.band.right == 0
    else:
        diagonal = _diagonal(p)
        regular = diagonal <= 0 and diagonal % steps.keys == 0 and p.n_k - diagonal <= p.n_q
    return steps.keys // steps.block_q if regular else 0


def backward(width: int) -> BackwardConfig:
    """The BackwardConfig for the larger head dim."""
    return BACKWARD[next(step for step in BACKWARD if width <= step)]
