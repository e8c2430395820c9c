"""Tile sizes, warps and stages of a kernel, and those of the careful walk."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """A tile of block_q x block_k.

    descriptors: the copy engine (TMA) of Hopper and later fetches blocks. programs: their number per processor if keys
    are split.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    descriptors: bool = False
    programs: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# The careful walk (nonfinite_rows.py), by padded head dim of a 16-bit type: the maximum number of rows that it makes at
# a time, the rows that it walks at a time, and warps.
CAREFUL = {64: (32, 32, 4), 128: (32, 32, 8), 256: (32, 32, 8), 512: (16, 32, 4), 1024: (16, 16, 4)}
CAREFUL_EXACT = (16, 16, 8)  # for exact float32 products, which NVIDIA's matrix units do not provide


def careful(dim: int, dim_v: int, itemsize: int, exact: bool, rows: int, walked: int) -> Config:
    """The tile of a careful walk that recomputes `rows` rows: block_q divides them, block_k divides `walked`.

    exact: float32 products are not rounded to TF32.
    """
    width = effective_width(max(dim, dim_v), itemsize)
    most, across, warps = CAREFUL_EXACT if exact and itemsize > 2 else CAREFUL[padded_width(width)]
    return Config(min(most, rows), min(across, walked), warps if rows >= most else 4, 1)


def effective_width(width: int, itemsize: int) -> int:
    """The width of a 16-bit tile of the same size in bytes."""
    return width * max(1, itemsize // 2)


def padded_width(width: int) -> int:
    return next((step for step in (64, 128, 256, 512) if width <= step), 1024)
