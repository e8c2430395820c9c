"""Tiles, stages and warpgroups of the Hopper kernels, by head dim; nothing is tuned at call time."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """A tile of 64 rows for each of `consumers` warpgroups by block_k keys, of which `stages` are on their way at once.

    registers: of a thread that consumes, and of one that loads; together they are all that a processor has.
    """

    block_k: int
    stages: int
    consumers: int
    registers: int
    load_registers: int
    out_over_q: bool = False  # the output leaves by the buffer of the queries


FORWARD = {64: Config(128, 3, 3, 160, 32), 128: Config(128, 2, 2, 240, 32), 256: Config(64, 2, 2, 240, 32, True)}
L2_SECTION = 32 << 20  # bytes of keys and values that programs work on at a time
MOST_PACKED = 16  # query heads that share the rows of a tile


def forward(width: int) -> Config:
    """For the wider of the two head dims."""
    return FORWARD[next(step for step in FORWARD if width <= step)]
