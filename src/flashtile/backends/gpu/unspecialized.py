"""Decode integers from the form, made by arguments.py, that Triton does not specialize kernels on."""

from __future__ import annotations

import triton
import triton.language as tl

UNSPECIALIZED = tl.constexpr(1 << 40)


@triton.jit
def plain(x):
    """Decode a number; a 32-bit argument is not encoded."""
    return ((x - UNSPECIALIZED) >> 1).to(tl.int32) if x.dtype == tl.int64 else x


@triton.jit
def half_of_seed(x):
    """Like plain(), as an unsigned 64-bit number."""
    return ((x - UNSPECIALIZED) >> 1).to(tl.uint64)
