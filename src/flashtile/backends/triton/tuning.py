"""Tiles, warps and stages for each architecture, head dim and kernel; nothing is tuned at call time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from flashtile.dtypes import ITEMSIZE
from flashtile.problem import Problem

KERNELS = ("forward", "dkdv", "dq", "decode")


class Config(NamedTuple):
    """A tile of block_q x block_k; whether the copy engine of Hopper and later fetches the blocks.

    registers: the most a thread may have, where the loop needs no more and another program then fits beside it.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    descriptors: bool = False
    registers: int | None = None


# As measured at N = 4096, by major compute capability and bytes an element, then by kernel and padded head dim.
# `flashtile bench tune` makes these rows.
MEASURED: dict[tuple[int, int], dict[str, dict[int, Config]]] = {
    (9, 2): {
        "forward": {
            64: Config(64, 64, 4, 3, True, 128),
            128: Config(128, 128, 8, 3, True),
            256: Config(64, 64, 4, 3, True),
        },
        "dkdv": {64: Config(64, 64, 4, 3, True), 128: Config(64, 64, 4, 2, True), 256: Config(64, 64, 8, 2, True)},
        "dq": {64: Config(64, 64, 4, 3, True), 128: Config(128, 64, 8, 3, True), 256: Config(128, 32, 8, 3, True)},
        "decode": {64: Config(16, 128, 4, 4), 128: Config(16, 64, 4, 4), 256: Config(16, 32, 4, 4)},
    },
}
# Anything else, by padded head dim of a 16-bit type: small enough for the shared memory of every GPU that Triton knows.
# A tile has at least 8 keys a warp (dkdv: queries): where warps share columns of a product, Triton 3.6 gave wrong
# numbers with a mask and dropout. The last column is for float32 alone, whose products there are of another kind.
ELSEWHERE = {
    "forward": {
        64: (64, 64, 4, 2),
        128: (64, 32, 4, 2),
        256: (32, 32, 4, 1),
        512: (16, 32, 4, 1),
        1024: (16, 16, 4, 1),
    },
    "dkdv": {64: (32, 64, 4, 2), 128: (32, 32, 4, 1), 256: (32, 32, 4, 1), 512: (32, 16, 4, 1), 1024: (16, 16, 8, 1)},
    "dq": {64: (64, 32, 4, 2), 128: (32, 32, 4, 1), 256: (32, 32, 4, 1), 512: (16, 32, 4, 1), 1024: (16, 16, 8, 1)},
    "decode": {64: (16, 64, 4, 3), 128: (16, 32, 4, 3), 256: (16, 32, 4, 3), 512: (16, 32, 4, 1), 1024: (16, 16, 4, 1)},
}
# The careful walk's (guard.py), likewise: the most rows it makes at a time, the rows it walks at a time, and warps.
CAREFUL = {64: (32, 32, 4), 128: (32, 32, 8), 256: (32, 32, 8), 512: (16, 32, 4), 1024: (16, 16, 4)}
CAREFUL_EXACT = (16, 16, 8)  # where float32 stays float32 and no matrix unit multiplies
DBIAS = Config(32, 32, 4, 1)
STATISTICS_ROWS = 64

_overrides: dict[str, Config] = {}


def choose(kernel: str, dim: int, dim_v: int, itemsize: int, capability: tuple[int, int] | None, pairs: bool) -> Config:
    """The tile for one of KERNELS. capability is None where the GPU is not NVIDIA's.

    `pairs`: there is a mask or a bias, whose tiles want shared memory too.
    """
    if kernel in _overrides:
        return _overrides[kernel]
    width = max(dim, dim_v)
    measured = MEASURED.get((capability[0], itemsize), {}).get(kernel, {}) if capability is not None else {}
    if _step(width) in measured and not (pairs and width > 128):
        config = measured[_step(width)]
        if pairs:
            return config._replace(block_q=min(64, config.block_q), block_k=min(64, config.block_k), stages=2)
        return config
    return Config(*ELSEWHERE[kernel][_step(_room(width, itemsize))])


def careful(dim: int, dim_v: int, itemsize: int, exact: bool, rows: int, walked: int) -> Config:
    """Of a careful walk in place of a tile of so many `rows`: block_q is a part of them, block_k one of `walked`.

    `exact`: products of float32 are not rounded to TF32.
    """
    room = _room(max(dim, dim_v), itemsize)
    most, across, warps = CAREFUL_EXACT if exact and itemsize > 2 else CAREFUL[_step(room)]
    return Config(min(most, rows), min(across, walked), warps if rows >= most else 4, 1)


@contextmanager
def override(kernel: str, config: Config) -> Iterator[None]:
    """Within it, choose() answers `config` for this kernel, whatever the problem: for whoever measures candidates."""
    before = _overrides.copy()
    _overrides[kernel] = config
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def forward(problem: Problem, capability: tuple[int, int] | None) -> tuple[Config, int]:
    """The tile of a forward pass, and how many query heads of a group share its rows, which they would leave empty."""
    p = problem
    room = (p.dim, p.dim_v, ITEMSIZE[p.dtype], capability, p.mask is not None or p.bias is not None)
    config, decode = choose("forward", *room), choose("decode", *room)
    heads = p.group if p.group > 1 and not p.packed and p.n_q * 2 <= config.block_q else 1
    return decode if heads * p.n_q <= decode.block_q and not p.packed else config, heads


def _room(width: int, itemsize: int) -> int:
    """A float32 tile takes the room of a 16-bit one of twice the width."""
    return width * max(1, itemsize // 2)


def _step(width: int) -> int:
    return next((step for step in (64, 128, 256, 512) if width <= step), 1024)
