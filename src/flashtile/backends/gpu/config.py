"""A tile with its warps and stages, and that of the careful walk."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """A tile of block_q x block_k; whether the copy engine of Hopper and later fetches the blocks.

    programs: where keys are split, for so many programs a processor.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    descriptors: bool = False
    programs: int = 1

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told of it."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# Of the careful walk (nonfinite_rows.py), by padded head dim of a 16-bit type: the most rows it makes at a time, the
# rows it walks at a time, and warps.
CAREFUL = {64: (32, 32, 4), 128: (32, 32, 8), 256: (32, 32, 8), 512: (16, 32, 4), 1024: (16, 16, 4)}
CAREFUL_EXACT = (16, 16, 8)  # where float32 stays float32, which on NVIDIA's GPUs no matrix unit multiplies


def careful(dim: int, dim_v: int, itemsize: int, exact: bool, rows: int, walked: int) -> Config:
    """Of a careful walk in place of a tile of so many `rows`: block_q is a part of them, block_k one of `walked`.

    `exact`: products of float32 are not rounded to TF32.
    """
    width = effective_width(max(dim, dim_v), itemsize)
    most, across, warps = CAREFUL_EXACT if exact and itemsize > 2 else CAREFUL[padded_width(width)]
    return Config(min(most, rows), min(across, walked), warps if rows >= most else 4, 1)


def effective_width(width: int, itemsize: int) -> int:
    """A float32 tile takes the room of a 16-bit one of twice the width."""
    return width * max(1, itemsize // 2)


def padded_width(width: int) -> int:
    return next((step for step in (64, 128, 256, 512) if width <= step), 1024)
