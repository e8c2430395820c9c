"""The jitted twin of cuts() in band.py, and the loop ranges of full and of partial tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.unspecialized import plain

NEAR = tl.constexpr(1 << 29)  # "no limit" in 32 bits: the sum of two still fits


@triton.jit
def reach(limit):
    """A band limit as a number; NEAR if it is None."""
    if limit is None:
        return NEAR
    else:
        return plain(limit)


@triton.jit
def clip(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def cuts(left, right, offset, first, last, n_cols, BLOCK: tl.constexpr):
    """begin, full_begin, full_end, end of the tiles that the rows first..last-1 see, as in band.py."""
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
    """Clip the cuts to the tiles from `low` to `high`."""
    found = ()
    for n in tl.static_range(len(cut)):
        found = found + (clip(cut[n], low, high),)  # noqa: RUF005
    return found


@triton.jit
def stretch_of(cut, n: tl.constexpr, TWO_ENDS: tl.constexpr):
    """The loop range of stretch n: 0 is the full tiles, 1 the partial ones, 2 (the careful walk) all of them.

    TWO_ENDS: tiles may be partial at both ends. The partial tiles of the first end then take the indices just before
    those of the last end, so that one loop visits both: every loop has to fill its pipeline. For the same reason the
    tiles of several spans, with four cuts each, have indices one after the other. tile_at() maps an index to its tile.
    """
    if len(cut) > 4:
        begin = cut[1] if n == 0 else cut[0]
        end = begin
        for s in tl.static_range(0, len(cut), 4):
            if n == 0:
                end += cut[s + 2] - cut[s + 1]
            elif n == 2:
                end += cut[s + 3] - cut[s]
            else:
                end += cut[s + 1] - cut[s] + cut[s + 3] - cut[s + 2]
        return begin, end
    elif n == 0:
        return cut[1], cut[2]
    elif n == 2:
        return cut[0], cut[3]
    elif TWO_ENDS:
        return cut[2] - (cut[1] - cut[0]), cut[3]
    else:
        return cut[2], cut[3]


@triton.jit
def tile_at(cut, place, n: tl.constexpr, TWO_ENDS: tl.constexpr):
    """The tile at index `place` of stretch n."""
    if len(cut) > 4:
        # Go on from the end of each part of the stretch to the begin of the next one.
        FIRST: tl.constexpr = 2 if n == 0 else (1 if n == 1 else 3)
        NEXT: tl.constexpr = 3 if n == 0 else 1
        for s in tl.static_range(FIRST, len(cut) - NEXT, 2 if n == 1 else 4):
            place = tl.where(place >= cut[s], place + (cut[s + NEXT] - cut[s]), place)
        return place
    elif n == 1 and TWO_ENDS:
        return tl.where(place < cut[2], place - cut[2] + cut[1], place)
    else:
        return place
