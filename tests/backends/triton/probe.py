"""Kernels that only call functions of cuts.py, so that tests can check what those return."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.cuts import cuts, stretch_of, tile_at


@triton.jit
def cuts_kernel(p_in, p_out, BLOCK: tl.constexpr):
    """A row of the input: left, right, offset, first, last, n_cols; of the output: the four cuts."""
    row = p_in + tl.program_id(0) * 6
    cut = cuts(
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), BLOCK
    )
    for n in tl.static_range(4):
        tl.store(p_out + tl.program_id(0) * 4 + n, cut[n])


@triton.jit
def walk_kernel(p_in, p_out, MOST: tl.constexpr, TWO_ENDS: tl.constexpr):
    """A row of the input:

    four cuts; of the output, for each tile: how often a walk visits it, and how often as full.
    """
    row = p_in + tl.program_id(0) * 4
    cut = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    for n in tl.static_range(2):
        begin, end = stretch_of(cut, n, TWO_ENDS)
        for place in range(begin, end):
            seen = p_out + (tl.program_id(0) * MOST + tile_at(cut, place, n, TWO_ENDS)) * 2
            tl.store(seen, tl.load(seen) + 1)
            tl.store(seen + 1, tl.load(seen + 1) + (n == 0))
