"""The way back from arguments.py's unspecialized(), the form of integers whose value must not decide what is compiled."""

from __future__ import annotations

import triton
import triton.language as tl

UNSPECIALIZED = tl.constexpr(1 << 40)


@triton.jit
def plain(x):
    """The number itself; an argument of 32 bits is that already."""
    return ((x - UNSPECIALIZED) >> 1).to(tl.int32) if x.dtype == tl.int64 else x


@triton.jit
def half_of_seed(x):
    """As plain(), unsigned and in 64 bits."""
    return ((x - UNSPECIALIZED) >> 1).to(tl.uint64)
