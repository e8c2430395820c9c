"""The jitted twin of band.py's cuts(), and the stretches it makes of a loop."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.steady import plain

NEAR = tl.constexpr(1 << 29)  # "no limit" in 32 bits: sums of two still fit


@triton.jit
def reach(limit):
    """A limit of the band as a number; None is none."""
    if limit is None:
        return NEAR
    else:
        return plain(limit)


@triton.jit
def clip(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def cuts(left, right, offset, first, last, n_cols, BLOCK: tl.constexpr):
    """begin, full_begin, full_end, end of the tiles that the rows first..last-1 see; as band.py says."""
    n = tl.cdiv(n_cols, BLOCK)
    begin = tl.minimum(tl.maximum(first + offset - left, 0) // BLOCK, n)
    end = clip(tl.cdiv(clip(last + offset + right, 0, n_cols), BLOCK), begin, n)
    # begin comes first: a constant plus a tensor is no tensor to the interpreter of Triton 3.8 and later.
    end = tl.where(begin * 0 + left + right < 0, begin, end)
    full_begin = clip(tl.cdiv(tl.maximum(last - 1 + offset - left, 0), BLOCK), begin, end)
    full_end = clip(clip(first + offset + right + 1, 0, n_cols) // BLOCK, full_begin, end)
    return begin, full_begin, full_end, end


@triton.jit
def within(cut, low, high):
    """The cuts of those tiles alone that lie from `low` to `high`."""
    return clip(cut[0], low, high), clip(cut[1], low, high), clip(cut[2], low, high), clip(cut[3], low, high)


@triton.jit
def stretch_of(cut, n: tl.constexpr):
    """Tiles of stretch n: 0 partial, 1 full, 2 partial; 3, the only one of a careful walk, is all of them."""
    if n == 3:
        return cut[0], cut[3]
    else:
        return cut[n], cut[n + 1]
