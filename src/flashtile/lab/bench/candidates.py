"""The tiles worth trying for a Triton kernel: all candidates, and the arithmetic of which ones could fit."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from typing import Any

from flashtile.backends.gpu.config import Config
from flashtile.backends.triton.tuning import DECODES, KERNELS

DTYPES, DIMS = ("bfloat16", "float32"), (64, 128, 256)
ITEMSIZE = {"bfloat16": 2, "float32": 4}
# All candidates: tiles of block_q x block_k by kernel; float32 has no room for the largest.
TILES = {
    "forward": ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)),
    "dkdv": ((32, 64), (32, 128), (64, 64), (64, 128), (128, 64), (128, 128)),
    "dq": ((64, 32), (64, 64), (128, 32), (128, 64), (128, 128)),
    "decode": ((16, 32), (16, 64), (16, 128), (16, 256)),
    "decode-short": ((16, 32), (16, 64), (16, 128)),
}
TILES_WIDE = {
    "forward": ((32, 16), (32, 32), (32, 64), (64, 32), (64, 64), (128, 32), (128, 64)),
    "dkdv": ((16, 32), (32, 32), (32, 64), (64, 32), (64, 64)),
    "dq": ((32, 16), (32, 32), (32, 64), (64, 32), (64, 64), (128, 32)),
    "decode": ((16, 16), (16, 32), (16, 64)),
    "decode-short": ((16, 16), (16, 32), (16, 64)),
}
WARPS = {"forward": (4, 8), "dkdv": (4, 8), "dq": (4, 8), "decode": (2, 4, 8), "decode-short": (1, 2, 4)}
STAGES = {"forward": (2, 3), "dkdv": (2, 1, 3), "dq": (2, 1, 3), "decode": (2, 3, 4), "decode-short": (2, 3, 4)}
PROGRAMS = {"decode-short": (1, 2)}  # per processor; one for other kernels
REGISTERS = (40, 250)  # of accumulators per thread: fewer leave warps idle, more cannot fit


@dataclass(frozen=True, slots=True)
class Target:
    """One entry of the table."""

    kernel: str
    dtype: str
    dim: int

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.dtype} D{self.dim}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the device: the shared memory of one program, and whether it has a copy engine."""

    shared: int
    copy_engine: bool


def targets(kernels: Collection[str] = (), dtypes: Collection[str] = (), dims: Collection[int] = ()) -> list[Target]:
    """The selected targets; an empty selection means all of a kind."""
    return [
        Target(kernel, dtype, dim)
        for dtype in dtypes or DTYPES
        for kernel in kernels or KERNELS
        for dim in dims or DIMS
    ]


def candidates(target: Target, limits: Limits) -> list[Config]:
    """Every configuration that could fit, by arithmetic only."""
    item = ITEMSIZE[target.dtype]
    tiles = (TILES if item == 2 else TILES_WIDE)[target.kernel]
    depths = STAGES[target.kernel]
    decodes = target.kernel in DECODES
    with_engine = limits.copy_engine and item == 2 and not decodes
    # With a copy engine, one depth without it is enough to see whether it pays.
    fetched = [(depth, False) for depth in (depths[:1] if with_engine else depths)]
    fetched += [(depth, True) for depth in depths if with_engine]
    low, high = (0 if decodes else REGISTERS[0]), REGISTERS[1]
    together = PROGRAMS.get(target.kernel, (1,))
    found = []
    for (br, bc), warps, (depth, engine), programs in product(tiles, WARPS[target.kernel], fetched, together):
        config = Config(br, bc, warps, depth, engine, programs=programs)
        if shared_bytes(target, config) <= limits.shared and low <= accumulators(target, config) <= high:
            found.append(config)
    return found


def shared_bytes(target: Target, config: Config) -> int:
    """The least shared memory: resident tiles (one or two) and streamed tiles (two per stage)."""
    wide, item = target.dim, ITEMSIZE[target.dtype]
    stays, streams = (
        (config.block_k * 2, config.block_q * 2) if target.kernel == "dkdv" else (config.block_q, config.block_k * 2)
    )
    return (stays + streams * config.stages) * wide * item


def accumulators(target: Target, config: Config) -> float:
    """32-bit numbers per thread: the accumulators, and one or two tiles of scores."""
    scores = config.block_q * config.block_k
    held = {
        **dict.fromkeys(("forward", *DECODES), config.block_q * target.dim + scores),
        "dkdv": 2 * config.block_k * target.dim + 2 * scores,
        "dq": config.block_q * target.dim + 2 * scores,
    }
    return held[target.kernel] / (32 * config.warps)


def limits() -> Limits:
    """The limits of the current CUDA device."""
    import torch

    about: Any = torch.cuda.get_device_properties()
    return Limits(int(about.shared_memory_per_block_optin), about.major >= 9)
