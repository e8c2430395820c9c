"""The forward kernel: a tile of queries walks the keys it sees. With SPLITS, each program walks a share of them."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.blocks import base, load_block, locate, measure, number, wide
from flashtile.backends.triton.cuts import cuts, stretch_of
from flashtile.backends.triton.guard import anew, finite_part, poison, spoiled
from flashtile.backends.triton.scores import LN2, LOG2E, dot, kept, shape_scores, visible_pairs


@triton.jit
def absorb(
    m,
    l,
    acc,
    b_q,
    k,
    v,
    k_desc,
    v_desc,
    k_head,
    k_start,
    j0,
    k_len,
    rule,
    o_i,
    o_h,
    in_q,
    sequence,
    offset,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    GUARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take in one tile of keys: eq. 4 and 5 of docs/algorithm.md, in base 2."""
    HIDDEN: tl.constexpr = MASKED or rule.mask is not None
    o_j = j0 + tl.arange(0, BLOCK_K)
    in_k = o_j < k_len
    first = k_start + j0
    b_k = load_block(k, k_desc, sequence, k_head, first, in_k, BLOCK_K, DIM, BLOCK_D, MASKED)  # [bc, d]
    b_v = load_block(v, v_desc, sequence, k_head, first, in_k, BLOCK_K, DIM_V, BLOCK_DV, MASKED)
    S = dot(b_q, tl.trans(b_k), tl.zeros([b_q.shape[0], BLOCK_K], acc.dtype), PRECISION)  # [br, bc]
    inside = in_q[:, None] & in_k[None, :]
    S, unit, _, visible = shape_scores(
        S, rule, o_i[:, None], o_j[None, :], o_h[:, None], inside, sequence, offset, MASKED
    )
    if HIDDEN:
        S = tl.where(visible, S * unit, float("-inf"))
        unit = unit * 0 + 1
    m_new = tl.maximum(m, tl.max(S, 1) * unit)
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    P = tl.exp2(S * unit - pivot[:, None])
    factor = tl.exp2(m - pivot)
    l = l * factor + tl.sum(P, 1)
    acc = acc * factor[:, None]
    if rule.seed is not None:
        P = tl.where(kept(rule, sequence, o_h[:, None], o_i[:, None], j0, b_q.shape[0], BLOCK_K), P, 0.0)
    return m_new, l, dot(P.to(b_v.dtype), finite_part(b_v, GUARD), acc, PRECISION)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    k_desc,
    v_desc,
    out,
    lse,
    p_sink,
    rule,
    lengths,
    out_split,
    lse_split,
    GROUP: tl.constexpr,
    PACKED_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    FIRST_STRETCH: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    REAL: tl.constexpr,
):
    """A program makes BLOCK_Q rows of the output. PACKED_HEADS query heads of a group share the rows of a tile."""
    split = tl.program_id(2) % SPLITS
    # Under a causal band the last rows see the most keys: they start first.
    sequence, tile = locate(
        lengths.cu_q, tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2) // SPLITS, lengths.sequences, BLOCK_Q
    )
    q_start, q_len, k_start, _, k_len, offset = measure(lengths, rule.offset, sequence)
    n_rows = q_len * PACKED_HEADS
    first = tile * BLOCK_Q
    if first < n_rows:
        r = first + tl.arange(0, BLOCK_Q)
        o_i = r // PACKED_HEADS
        o_h = tl.program_id(1) * PACKED_HEADS + r % PACKED_HEADS
        in_q = r < n_rows
        o_d = tl.arange(0, BLOCK_D)
        o_v = tl.arange(0, BLOCK_DV)
        p_q = base(q, sequence, o_h, q_start)[:, None] + wide(o_i)[:, None] * q.row + o_d[None, :]
        b_q = tl.load(p_q, mask=in_q[:, None] & (o_d < DIM)[None, :], other=0.0)
        m, l = begin_rows(p_sink, o_h, in_q & (split == 0), REAL)
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], REAL)
        last = (tl.minimum(first + BLOCK_Q, n_rows) - 1) // PACKED_HEADS + 1
        cut = cuts(rule.left, rule.right, offset, first // PACKED_HEADS, last, k_len, BLOCK_K)
        if SPLITS > 1:
            cut = share_of(cut, split, SPLITS)
        k_head = tl.program_id(1) * PACKED_HEADS // GROUP
        again = tl.zeros([], tl.int1)
        for n in tl.static_range(FIRST_STRETCH, 4):
            if n == 3:
                again = spoiled(acc)
                m_first, l_first = begin_rows(p_sink, o_h, in_q & (split == 0), REAL)
                m = tl.where(again, m_first, m)
                l = tl.where(again, l_first, l)
                acc = anew(again, acc)
            begin, end = stretch_of(cut, again, n)
            for j in range(begin, end):
                m, l, acc = absorb(
                    m,
                    l,
                    acc,
                    b_q,
                    k,
                    v,
                    k_desc,
                    v_desc,
                    k_head,
                    k_start,
                    j * BLOCK_K,
                    k_len,
                    rule,
                    o_i,
                    o_h,
                    in_q,
                    sequence,
                    offset,
                    DIM,
                    DIM_V,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_K,
                    n != 1,
                    n == 3,
                    PRECISION,
                )
        weight = 1 / tl.where(l == 0, 1.0, l)  # eq. 7
        if rule.seed is not None:
            weight *= number(rule.keep_scale, REAL)
        L = tl.where(l == 0, float("-inf"), m * LN2 + tl.log(l))
        p_out = base(out, sequence, o_h, q_start)[:, None] + wide(o_i)[:, None] * out.row + o_v[None, :]
        p_lse = base(lse, sequence, o_h, q_start) + wide(o_i) * lse.row
        there = in_q[:, None] & (o_v < DIM_V)[None, :]
        tl.store(p_out + wide(split) * out_split, (acc * weight[:, None]).to(out.ptr.dtype.element_ty), mask=there)
        tl.store(p_lse + wide(split) * lse_split, L, mask=in_q)
        if again:
            tl.debug_barrier()
            target = wide(o_h) * out.head + wide(o_i) * out.row
            p_target = base(out, sequence, 0, q_start) + wide(split) * out_split
            p_v = base(v, sequence, k_head, k_start)
            for j in range(cut[0], cut[3]):
                o_j = j * BLOCK_K + tl.arange(0, BLOCK_K)
                in_k = o_j < k_len
                inside = in_q[:, None] & in_k[None, :]
                visible = visible_pairs(rule, o_i[:, None], o_j[None, :], o_h[:, None], inside, sequence, offset, True)
                poison(p_target, target, in_q, p_v, v.row, j * BLOCK_K, in_k, visible, DIM_V, False, PRECISION)


@triton.jit
def begin_rows(p_sink, o_h, has_sink, REAL: tl.constexpr):
    """m and l before any key. A sink is a first key whose value is 0."""
    m = tl.full(o_h.shape, float("-inf"), REAL)
    if p_sink is not None:
        m = tl.load(p_sink + o_h, mask=has_sink, other=float("-inf")).to(REAL) * LOG2E
    return m, tl.where(m == float("-inf"), 0.0, 1.0).to(REAL)


@triton.jit
def share_of(cut, split, SPLITS: tl.constexpr):
    """The part of a row's tiles that one of SPLITS programs walks."""
    share = tl.cdiv(cut[3] - cut[0], SPLITS)
    begin = tl.minimum(cut[0] + split * share, cut[3])
    end = tl.minimum(begin + share, cut[3])
    full_begin = tl.minimum(tl.maximum(cut[1], begin), end)
    return begin, full_begin, tl.minimum(tl.maximum(cut[2], full_begin), end), end
