"""Tiles, warps and stages for each architecture, head dim and kernel; nothing is tuned at call time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flashtile.backends.gpu.config import Config, effective_width, padded_width
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.problem import Problem

DECODES = ("decode", "decode-short")
KERNELS = ("forward", "dkdv", "dq", *DECODES)
FEW_KEYS = 1024  # a split decode is "decode-short" if programs, one per processor, would walk no more keys


# Measured, by major compute capability and bytes per element, then by kernel and padded head dim.
# `flashtile bench tune` makes such rows, over N = 1024 and 4096. It made those of forward at 64 and of backward at 128;
# those of forward at 128 and of decode-short were found by hand; the others are older, from N = 4096 alone.
MEASURED: dict[tuple[int, int], dict[str, dict[int, Config]]] = {
    (9, 2): {
        "forward": {
            64: Config(64, 128, 4, 2, True),
            128: Config(64, 64, 4, 3, True, programs=2),
            256: Config(64, 64, 4, 3, True),
        },
        "dkdv": {64: Config(64, 64, 4, 3, True), 128: Config(64, 64, 4, 2, True), 256: Config(64, 64, 8, 2, True)},
        "dq": {64: Config(64, 64, 4, 3, True), 128: Config(128, 64, 8, 3, True), 256: Config(128, 32, 8, 3, True)},
        "decode": {64: Config(16, 128, 4, 4), 128: Config(16, 64, 4, 4), 256: Config(16, 32, 4, 4)},
        "decode-short": {128: Config(16, 64, 2, 3, programs=2)},
    },
}
# With dropout, weights pass through shared memory and random numbers take registers: these tiles fit, and the compiler
# reports no spills in their loops. Without a row here, the one of other calls applies.
DROPOUT: dict[tuple[int, int], dict[str, dict[int, Config]]] = {
    (9, 2): {
        "forward": {128: Config(128, 64, 8, 3, True), 256: Config(64, 64, 8, 2, True)},
        "dkdv": {64: Config(64, 64, 8, 2, True), 128: Config(64, 64, 8, 2, True), 256: Config(32, 64, 8, 2, True)},
        "dq": {256: Config(64, 32, 8, 3, True)},
    },
}
# Not measured: tiles that fit the shared memory of these GPUs and do not spill in the loop over full tiles, according
# to the compiler (tests/backends/triton/test_targets.py). 16-bit types, by kernel and padded head dim.
REASONED: dict[str, dict[str, dict[int, Config]]] = {
    "ampere": {  # 163 KB
        "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 64, 8, 2)},
        "dkdv": {64: Config(64, 128, 8, 2), 128: Config(64, 64, 8, 2), 256: Config(64, 32, 8, 1)},
        "dq": {64: Config(128, 64, 8, 2), 128: Config(128, 64, 8, 2), 256: Config(64, 64, 8, 2)},
        "decode": {64: Config(16, 64, 4, 3), 128: Config(16, 64, 4, 3)},
    },
    "ada": {  # 99 KB
        "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 64, 8, 1)},
        "dkdv": {64: Config(64, 128, 8, 2), 128: Config(64, 64, 8, 2)},
        "dq": {64: Config(128, 64, 8, 2), 128: Config(64, 64, 4, 2), 256: Config(32, 32, 4, 2)},
        "decode": {64: Config(16, 64, 4, 3)},
    },
    "blackwell": {  # 227 KB, and 512 columns of tensor memory, which dkdv at 256 overflows
        "forward": {
            64: Config(128, 64, 4, 3, True),
            128: Config(128, 64, 8, 3, True),
            256: Config(128, 64, 8, 2, True),
        },
        "dkdv": {64: Config(64, 128, 8, 2, True), 128: Config(64, 128, 8, 2, True)},
        "dq": {64: Config(128, 64, 8, 2), 128: Config(128, 64, 8, 2, True), 256: Config(64, 32, 4, 2)},
        "decode": {64: Config(16, 64, 4, 3), 128: Config(16, 64, 4, 3)},
    },
    "cdna": {  # 64 KB; with 4 warps a lane has 512 registers, with 8 half of them
        "forward": {64: Config(128, 64, 4, 1), 128: Config(128, 64, 4, 1), 256: Config(64, 64, 4, 1)},
        "dkdv": {64: Config(64, 128, 4, 1), 128: Config(32, 64, 4, 1)},
        "dq": {64: Config(128, 64, 4, 1), 128: Config(64, 64, 4, 1), 256: Config(64, 32, 4, 1)},
        "decode": {256: Config(16, 32, 4, 2)},
    },
    "rdna": {  # 64 KB, 256 registers
        "forward": {64: Config(64, 32, 4, 1), 128: Config(128, 32, 8, 1), 256: Config(128, 16, 8, 1)},
        "dkdv": {64: Config(16, 64, 4, 1), 128: Config(16, 128, 8, 1), 256: Config(16, 128, 8, 1)},
        "dq": {64: Config(64, 16, 4, 1), 128: Config(128, 16, 8, 1), 256: Config(128, 16, 8, 1)},
        "decode": {64: Config(16, 64, 4, 1), 128: Config(16, 32, 4, 1), 256: Config(16, 32, 4, 1)},
    },
}
# All other cases, by padded head dim of a 16-bit type: small enough for the shared memory of every GPU that Triton
# supports. A tile has at least 8 keys per warp (dkdv: queries): if warps share columns of a product, Triton 3.6 gives
# wrong numbers with a mask and dropout. The last column is for float32 alone, whose products there are of another kind.
DEFAULT = {
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
DBIAS = Config(32, 32, 4, 1)
STATISTICS_ROWS = {9: 16}  # measured, by major compute capability; 64 elsewhere
MERGED = 16384  # bytes of partial results that one warp holds in registers

_overrides: dict[str, Config] = {}


def choose(
    kernel: str,
    dim: int,
    dim_v: int,
    itemsize: int,
    gpu: tuple[int, int] | str | None,
    pairs: bool = False,
    dropout: bool = False,
) -> Config:
    """The tile for one of KERNELS. gpu: an NVIDIA compute capability, or an AMD architecture ("gfx942").

    pairs: there is a mask or a bias, whose tiles need shared memory too. A short decode with pairs, or without a row of
    its own, uses the row of "decode".
    """
    if kernel in _overrides:
        return _overrides[kernel]
    width = max(dim, dim_v)
    measured: dict[int, Config] = {}
    if isinstance(gpu, tuple):
        measured |= MEASURED.get((gpu[0], itemsize), {}).get(kernel, {})
        if dropout:
            measured |= DROPOUT.get((gpu[0], itemsize), {}).get(kernel, {})
    if kernel == "decode-short" and (pairs or padded_width(width) not in measured):
        return choose("decode", dim, dim_v, itemsize, gpu, pairs, dropout)
    if padded_width(width) in measured and not (pairs and width > 128):
        config = measured[padded_width(width)]
        if pairs:
            return config._replace(block_q=min(64, config.block_q), block_k=min(64, config.block_k), stages=2)
        return config
    reasoned = REASONED.get(_family(gpu), {}).get(kernel, {})
    if padded_width(width) in reasoned and itemsize == 2 and not pairs:
        return reasoned[padded_width(width)]
    return Config(*DEFAULT[kernel][padded_width(effective_width(width, itemsize))])


def choice_options(problem: Problem) -> tuple[bool, bool]:
    """The arguments `pairs` and `dropout` of choose()."""
    return problem.mask is not None or problem.bias is not None, problem.dropout > 0


def statistics_rows(gpu: tuple[int, int] | str | None) -> int:
    """The rows of a program that computes row statistics."""
    return STATISTICS_ROWS.get(gpu[0], 64) if isinstance(gpu, tuple) else 64


def merge_warps(size: int) -> int:
    """The warps of a program that merges `size` bytes: one if possible, so that its sums need not cross warps."""
    return min(8, 1 << ((size - 1) // MERGED).bit_length())


@contextmanager
def override(kernel: str, config: Config) -> Iterator[None]:
    """Make choose() return `config` for this kernel, whatever the problem, to measure candidates."""
    before = _overrides.copy()
    _overrides[kernel] = config
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def forward(problem: Problem, gpu: tuple[int, int] | str | None, short: bool = False) -> tuple[Config, int]:
    """The tile of a forward pass, and how many query heads of a group share its rows; one head would leave most empty.

    short: if this is a decode, it is a short one.
    """
    p = problem
    arguments = (p.dim, p.dim_v, ITEMSIZE[p.dtype], gpu, *choice_options(p))
    config, decode = choose("forward", *arguments), choose("decode-short" if short else "decode", *arguments)
    heads = p.group if p.group > 1 and not p.packed and p.n_q * 4 <= config.block_q * 3 else 1
    return decode if heads * p.n_q <= decode.block_q and not p.packed else config, heads


def _family(gpu: tuple[int, int] | str | None) -> str:
    """The row of REASONED: GPUs of one instruction set and shared memory. Small Blackwells (12.x) are like Ada."""
    if isinstance(gpu, str):
        return "cdna" if gpu.startswith("gfx9") else "rdna"
    if gpu is None:
        return ""
    return "ampere" if gpu in ((8, 0), (8, 7)) else {8: "ada", 10: "blackwell", 12: "ada"}.get(gpu[0], "")
