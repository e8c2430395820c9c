"""Flash attention, forward, as one Triton kernel: a block of queries iterates over its visible keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    n,
    scale,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (i, h) computes BLOCK_Q rows of head h. q, k, v and out are [heads, n, DIM], contiguous."""
    first = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64) * n * DIM
    o_d = tl.arange(0, DIM)
    o_i = first + tl.arange(0, BLOCK_Q)  # this program's queries
    rows = head + o_i[:, None] * DIM + o_d[None, :]
    b_q = tl.load(p_q + rows, mask=(o_i < n)[:, None], other=0.0)  # [br, d], read once

    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # the three running statistics, in registers
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)

    end = n
    if CAUSAL:
        end = tl.minimum(n, first + BLOCK_Q)  # none of these queries sees later tiles
    for j in range(0, end, BLOCK_K):
        o_j = j + tl.arange(0, BLOCK_K)
        in_k = (o_j < n)[:, None]
        keys = head + o_j[:, None] * DIM + o_d[None, :]
        b_k = tl.load(p_k + keys, mask=in_k, other=0.0)  # [bc, d]
        b_v = tl.load(p_v + keys, mask=in_k, other=0.0)  # [bc, d]

        S = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [br, bc], never leaves the chip
        visible = (o_j < n)[None, :]
        if CAUSAL:
            visible = visible & (o_j[None, :] <= o_i[:, None])
        S = tl.where(visible, S, float("-inf"))

        m_new = tl.maximum(m, tl.max(S, 1))
        factor = tl.exp(m - m_new)
        P = tl.exp(S - m_new[:, None])
        l = l * factor + tl.sum(P, 1)
        acc = tl.dot(P.to(b_v.dtype), b_v, acc * factor[:, None], input_precision="ieee")
        m = m_new

    out = acc / l[:, None]  # the only division
    tl.store(p_out + rows, out.to(p_out.dtype.element_ty), mask=(o_i < n)[:, None])  # the only write
