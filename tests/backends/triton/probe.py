"""A kernel that does nothing but call cuts(), so that a test can see what it returns."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.cuts import cuts


@triton.jit
def cuts_kernel(p_in, p_out, BLOCK: tl.constexpr):
    """Row i of the input: left, right, offset, first, last, n_cols; of the output: the four cuts."""
    row = p_in + tl.program_id(0) * 6
    cut = cuts(
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), BLOCK
    )
    for n in tl.static_range(4):
        tl.store(p_out + tl.program_id(0) * 4 + n, cut[n])
