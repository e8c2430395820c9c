"""C = A B, one tile of C per program: blocks of A and B are loaded once and used for the whole tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(p_a, p_b, p_c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Program (i, j) computes one tile of C and writes it once. A is [m, k], B [k, n], C [m, n], rows contiguous."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # stays in registers
    for first in range(0, k, BLOCK_K):
        o_k = first + tl.arange(0, BLOCK_K)
        m_a = (o_m < m)[:, None] & (o_k < k)[None, :]
        m_b = (o_k < k)[:, None] & (o_n < n)[None, :]
        b_a = tl.load(p_a + o_m[:, None] * k + o_k[None, :], mask=m_a, other=0.0)  # each used BLOCK_N times
        b_b = tl.load(p_b + o_k[:, None] * n + o_n[None, :], mask=m_b, other=0.0)  # each used BLOCK_M times
        acc = tl.dot(b_a, b_b, acc, input_precision="ieee")
    m_c = (o_m < m)[:, None] & (o_n < n)[None, :]
    tl.store(p_c + o_m[:, None] * n + o_n[None, :], acc.to(p_c.dtype.element_ty), mask=m_c)
