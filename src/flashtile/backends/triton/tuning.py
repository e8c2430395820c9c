"""Tiles, warps and stages for each architecture, head dim and kernel; nothing is tuned at call time."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """A tile of block_q x block_k; whether the copy engine of Hopper and later fetches the blocks."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    descriptors: bool = False


# 16-bit types on sm_90, by padded head dim, as measured on one H200 at N = 4096.
HOPPER = {
    "forward": {64: Config(64, 64, 4, 3, True), 128: Config(128, 128, 8, 3, True), 256: Config(128, 64, 8, 2, True)},
    "dkdv": {64: Config(64, 64, 4, 3, True), 128: Config(64, 64, 4, 2, True), 256: Config(64, 64, 8, 2, True)},
    "dq": {64: Config(64, 64, 4, 3, True), 128: Config(128, 64, 8, 3, True), 256: Config(128, 32, 8, 2, True)},
}
# Anything else: small enough for the shared memory of every GPU that Triton knows.
ELSEWHERE = {
    "forward": {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (32, 32, 4, 1), 512: (16, 16, 4, 1)},
    "dkdv": {64: (32, 64, 4, 2), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1), 512: (16, 16, 8, 1)},
    "dq": {64: (64, 32, 4, 2), 128: (32, 32, 4, 1), 256: (32, 16, 4, 1), 512: (16, 16, 8, 1)},
}
DECODE = Config(16, 64, 4, 3)
DBIAS = Config(32, 32, 4, 1)
DELTA_ROWS = 64


def choose(kernel: str, dim: int, dim_v: int, itemsize: int, capability: tuple[int, int] | None, pairs: bool) -> Config:
    """The tile for a kernel: "forward", "dkdv" or "dq". capability is None where the GPU is not NVIDIA's.

    `pairs`: there is a mask or a bias, whose tiles want shared memory too.
    """
    width = max(dim, dim_v)
    if itemsize == 2 and capability is not None and capability[0] == 9 and width <= (128 if pairs else 256):
        config = HOPPER[kernel][_step(width)]
        return (
            config._replace(block_q=min(64, config.block_q), block_k=min(64, config.block_k), stages=2)
            if pairs
            else config
        )
    wide = width * max(1, itemsize // 2)  # a float32 tile takes the room of a 16-bit one of twice the width
    return Config(*ELSEWHERE[kernel][_step(wide)])


def _step(width: int) -> int:
    return next((step for step in (64, 128, 256) if width <= step), 512)
