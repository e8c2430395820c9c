"""c = a + b, one block per program: the smallest kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_kernel(p_a, p_b, p_c, n, BLOCK: tl.constexpr):
    """Program i adds BLOCK elements from i * BLOCK on. The mask covers the part of the last block past the end."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] positions, all at once
    inside = o < n
    a = tl.load(p_a + o, mask=inside)
    b = tl.load(p_b + o, mask=inside)
    tl.store(p_c + o, a + b, mask=inside)
