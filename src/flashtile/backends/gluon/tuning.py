"""Tiles, stages and warpgroups of the Hopper kernels, by head dim; nothing is tuned at call time."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.band import FAR
from flashtile.numerics import dtypes
from flashtile.problem import Problem

ROWS = 64  # of a warpgroup: what its matrix instruction takes


class Config(NamedTuple):
    """A tile of 64 rows for each of `consumers` warpgroups by block_k keys, of which `stages` are on their way at once.

    registers: of a thread that consumes, and of one that loads; together they are all that a processor has.
    """

    block_k: int
    stages: int
    consumers: int
    registers: int
    load_registers: int
    out_parts: int = 1  # in which an output leaves, by a buffer of that size; one that is not of the widest is whole
    weights_shared: bool = False  # P waits for its values in shared memory, not in registers; for 8 bits


class BackwardConfig(NamedTuple):
    """Tiles of block_q queries in the backward kernels, for tasks of so many keys. dq_buffers: of each warpgroup.

    scores_first: those of the next tile begin before dQ of this one is stored, and the fence for dS comes before the
    products. Over head dim 128 it is always so.
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
# With a warpgroup less, for heads of few rows, which would leave much of three empty. By bytes an element and head dim.
FEWER = {(2, 64), (1, 64), (1, 128)}
TWO = Config(128, 3, 2, 240, 32)
EMPTIER = 1.25  # how much larger all tiles of three have to be than those of two, for it to pay
BACKWARD = {
    64: BackwardConfig(128, 128, 2, 2, scores_first=True),
    128: BackwardConfig(64, 128, 2, 2, scores_first=False),
    256: BackwardConfig(64, 64, 1, 1, scores_first=True),
}
WIDEST_BACKWARD = max(BACKWARD)
L2_SECTION = 16 << 20  # bytes of keys and values that programs work on at a time; each half of the L2 has its own copy
WAVES = 2  # tasks of the backward pass a processor, whose heads are worked on side by side
PACKED_WAVES = 4  # of packed sequences: the longest of a head may come last
MOST_PROCESSORS = 132  # that a Hopper GPU has
MOST_PACKED = 16  # query heads that share the rows of a tile


def section(problem: Problem, tiles: int, columns: int, processors: int) -> int:
    """How many heads of a backward pass have so many tasks a processor; see columns.find_column().

    The order of sums goes by sections: where it is asked for, it is that of the largest Hopper GPU on all of them.
    """
    p = problem
    waves, of = (WAVES, MOST_PROCESSORS) if p.deterministic else (PACKED_WAVES if p.packed else WAVES, processors)
    return max(1, min(columns, -(-waves * of // max(1, tiles))))


def packed_heads(problem: Problem) -> int:
    """Query heads of a group that share the rows of a tile, where one head alone would leave most of them empty."""
    p = problem
    if p.packed or p.group & (p.group - 1) or p.group > MOST_PACKED:
        return 1
    rows = ROWS * forward(max(p.dim, p.dim_v), p.dtype).consumers
    return p.group if p.n_q * 2 <= rows else 1


def forward(width: int, dtype: str = "bfloat16", rows: int | None = None) -> Config:
    """For the wider of the two head dims. rows: of a head, or of those that share tiles; None where lengths differ."""
    table = EIGHT_BITS if dtype == dtypes.EIGHT_BITS else FORWARD
    step = next(step for step in table if width <= step)
    config = table[step]
    if rows is None or (dtypes.ITEMSIZE[dtype], step) not in FEWER:
        return config
    return TWO if _padded(rows, config) >= EMPTIER * _padded(rows, TWO) else config


def forward_of(problem: Problem, packed_heads: int) -> Config:
    """forward() for a problem whose tiles have rows of so many heads."""
    p = problem
    config = forward(max(p.dim, p.dim_v), p.dtype, None if p.packed else p.n_q * packed_heads)
    return config if 2 * p.dim_v > max(FORWARD) else config._replace(out_parts=1)


def _padded(rows: int, config: Config) -> int:
    """These rows and those that their tiles leave empty."""
    tile = ROWS * config.consumers
    return -(-rows // tile) * tile


def one_right_cut(problem: Problem) -> bool:
    """Whether, of the key tiles that 64 rows see, only the last is cut on the right, and every row sees some of it.

    True may be said only where it is sure; a kernel for it is leaner.
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
    """How many of the tiles of queries that see some keys the diagonal cuts, if as many in each column; else 0.

    The last of them may lie beyond the last query. same_starts: packed queries and keys begin at the same places.
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
    """For the wider of the two head dims."""
    return BACKWARD[next(step for step in BACKWARD if width <= step)]
