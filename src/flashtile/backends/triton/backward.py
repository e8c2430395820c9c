"""The backward kernels: delta, then dK and dV by key tiles, dQ by query tiles, dbias by its own tiles. No atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.blocks import base, load_block, locate, measure, number, store_block, wide
from flashtile.backends.triton.cuts import cuts, stretch_of
from flashtile.backends.triton.guard import anew, finite_part, poison, spoiled
from flashtile.backends.triton.scores import LOG2E, dot, kept, pair_pointers, shape_scores, visible_pairs


@triton.jit
def delta_kernel(
    dout,
    out,
    lse,
    dlse,
    delta,
    n_rows,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """delta = rowsum(dO * O) - dL, and 0 for an empty row."""
    first = tl.program_id(0) * BLOCK
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    o_r = tl.arange(0, BLOCK)
    inside = first + o_r < n_rows
    b_out = load_block(out, None, sequence, head, first, inside, BLOCK, DIM_V, BLOCK_DV, True)
    b_do = load_block(dout, None, sequence, head, first, inside, BLOCK, DIM_V, BLOCK_DV, True)
    L = tl.load(base(lse, sequence, head, first) + o_r * lse.row, mask=inside, other=0.0)
    D = tl.sum(b_out.to(L.dtype) * b_do.to(L.dtype), 1)
    if dlse is not None:
        D -= tl.load(base(dlse, sequence, head, first) + o_r * dlse.row, mask=inside, other=0.0)
    D = tl.where(float("-inf") == L, 0.0, D)
    tl.store(base(delta, sequence, head, first) + o_r * delta.row, D, mask=inside)


@triton.jit
def load_statistics(p_lse, p_delta, lse_row, delta_row, first, o_r, inside):
    """lse in base 2 and delta. Outside, and for an empty row, lse is +inf: its weights come out as 0."""
    L = tl.load(p_lse + wide(first) * lse_row + o_r * lse_row, mask=inside, other=float("-inf"))
    D = tl.load(p_delta + wide(first) * delta_row + o_r * delta_row, mask=inside, other=0.0)
    return tl.where(float("-inf") == L, float("inf"), L * LOG2E), D


@triton.jit
def weights(S, L, rule, o_i, o_j, o_h, inside, sequence, offset, MASKED: tl.constexpr):
    """P again from the scores and lse (eq. 9), softcap's slope, and what is visible. S is q.k, either way round."""
    S, unit, slope, visible = shape_scores(S, rule, o_i, o_j, o_h, inside, sequence, offset, MASKED)
    P = tl.exp2(S * unit - L)
    if MASKED or rule.mask is not None:
        P = tl.where(visible, P, 0.0)
    return P, slope, visible


@triton.jit
def dscores(P, dP, D, slope, visible, rule, HIDDEN: tl.constexpr):
    """dS = P * (dP - D), eq. 12, and dS * slope; 0 where a pair may not see each other, whatever dP and slope are."""
    dS = P * (dP - D)
    if HIDDEN:
        dS = tl.where(visible, dS, 0.0)
    dS_bent = dS
    if rule.softcap is not None:
        dS_bent = dS * slope
        if HIDDEN:
            dS_bent = tl.where(visible, dS_bent, 0.0)
    return dS, dS_bent


@triton.jit
def dkdv_tile(
    b_dk,
    b_dv,
    b_k,
    b_v,
    q,
    dout,
    q_desc,
    do_desc,
    lse,
    delta,
    h,
    q_start,
    q_len,
    i0,
    o_j,
    j0,
    in_k,
    rule,
    sequence,
    offset,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr,
    GUARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of queries gives its share to dK and dV; everything is transposed, [bc, br]."""
    HIDDEN: tl.constexpr = MASKED or rule.mask is not None
    BLOCK_K: tl.constexpr = b_k.shape[0]
    BLOCK_D: tl.constexpr = b_k.shape[1]
    BLOCK_DV: tl.constexpr = b_v.shape[1]
    o_r = tl.arange(0, BLOCK_Q)
    o_i = i0 + o_r
    in_q = o_i < q_len
    first = q_start + i0
    b_q = load_block(q, q_desc, sequence, h, first, in_q, BLOCK_Q, DIM, BLOCK_D, MASKED)
    b_do = load_block(dout, do_desc, sequence, h, first, in_q, BLOCK_Q, DIM_V, BLOCK_DV, MASKED)
    p_lse = base(lse, sequence, h, q_start)
    p_delta = base(delta, sequence, h, q_start)
    L, D = load_statistics(p_lse, p_delta, lse.row, delta.row, i0, o_r, in_q)
    zero = tl.zeros([BLOCK_K, BLOCK_Q], b_dk.dtype)
    S = dot(b_k, tl.trans(b_q), zero, PRECISION)
    inside = in_k[:, None] & in_q[None, :]
    P, slope, visible = weights(S, L[None, :], rule, o_i[None, :], o_j[:, None], h, inside, sequence, offset, MASKED)
    dP = dot(b_v, tl.trans(b_do), zero, PRECISION)  # eq. 11
    dropped = P
    if rule.seed is not None:
        keep = tl.trans(kept(rule, sequence, h, o_i[:, None], j0, BLOCK_Q, BLOCK_K))
        keep_scale = number(rule.keep_scale, P.dtype)
        dropped = tl.where(keep, P * keep_scale, 0.0)
        dP = tl.where(keep, dP * keep_scale, 0.0)
    b_dv = dot(dropped.to(b_do.dtype), finite_part(b_do, GUARD), b_dv, PRECISION)  # eq. 10
    _, dS = dscores(P, dP, D[None, :], slope, visible, rule, HIDDEN)
    return dot(dS.to(b_q.dtype), finite_part(b_q, GUARD), b_dk, PRECISION), b_dv  # eq. 14


@triton.jit
def dkdv_kernel(
    q,
    k,
    v,
    dout,
    q_desc,
    do_desc,
    lse,
    delta,
    dk,
    dv,
    rule,
    lengths,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    REAL: tl.constexpr,
):
    """A program owns BLOCK_K keys of one key head and walks the queries of the group that see them."""
    head = tl.program_id(1)
    sequence, tile = locate(lengths.cu_k, tl.program_id(0), tl.program_id(2), lengths.sequences, BLOCK_K)
    q_start, q_len, k_start, k_room, k_len, offset = measure(lengths, rule.offset, sequence)
    j0 = tile * BLOCK_K
    if j0 < k_room:
        o_c = tl.arange(0, BLOCK_K)
        o_j = j0 + o_c
        o_d = tl.arange(0, BLOCK_D)
        o_v = tl.arange(0, BLOCK_DV)
        in_k = o_j < k_len
        b_k = load_block(k, None, sequence, head, k_start + j0, in_k, BLOCK_K, DIM, BLOCK_D, True)
        b_v = load_block(v, None, sequence, head, k_start + j0, in_k, BLOCK_K, DIM_V, BLOCK_DV, True)
        b_dk = tl.zeros([BLOCK_K, BLOCK_D], REAL)
        b_dv = tl.zeros([BLOCK_K, BLOCK_DV], REAL)
        # The band with the roles swapped says which query tiles see these keys.
        last = tl.maximum(tl.minimum(j0 + BLOCK_K, k_len), j0 + 1)
        cut = cuts(rule.right, rule.left, -offset, j0, last, q_len * (j0 < k_len), BLOCK_Q)
        again = tl.zeros([], tl.int1)
        for walk in tl.static_range(2):
            if walk == 1:
                again = spoiled(b_dk) | spoiled(b_dv)
                b_dk = anew(again, b_dk)
                b_dv = anew(again, b_dv)
            for h in range(head * GROUP, head * GROUP + GROUP):
                for n in tl.static_range(3 * walk, 3 + walk):
                    begin, end = stretch_of(cut, again, n)
                    for i in range(begin, end):
                        b_dk, b_dv = dkdv_tile(
                            b_dk,
                            b_dv,
                            b_k,
                            b_v,
                            q,
                            dout,
                            q_desc,
                            do_desc,
                            lse,
                            delta,
                            h,
                            q_start,
                            q_len,
                            i * BLOCK_Q,
                            o_j,
                            j0,
                            in_k,
                            rule,
                            sequence,
                            offset,
                            DIM,
                            DIM_V,
                            BLOCK_Q,
                            n != 1,
                            walk == 1,
                            PRECISION,
                        )
        scale = number(rule.scale, REAL)
        b_dk = tl.where(in_k[:, None], b_dk * scale, 0.0)  # keys that are not in use have no gradient
        b_dv = tl.where(in_k[:, None], b_dv, 0.0)
        there = o_j < k_room
        store_block(base(dk, sequence, head, k_start), dk.row, j0, o_c, o_d, there, DIM, b_dk)
        store_block(base(dv, sequence, head, k_start), dv.row, j0, o_c, o_v, there, DIM_V, b_dv)
        if again:
            tl.debug_barrier()
            p_dk = base(dk, sequence, head, k_start)
            p_dv = base(dv, sequence, head, k_start)
            for h in range(head * GROUP, head * GROUP + GROUP):
                p_q = base(q, sequence, h, q_start)
                p_do = base(dout, sequence, h, q_start)
                for i in range(cut[0], cut[3]):
                    i0 = i * BLOCK_Q
                    o_i = i0 + tl.arange(0, BLOCK_Q)
                    in_q = o_i < q_len
                    inside = in_k[:, None] & in_q[None, :]
                    visible = visible_pairs(rule, o_i[None, :], o_j[:, None], h, inside, sequence, offset, True)
                    poison(p_dk, wide(o_j) * dk.row, in_k, p_q, q.row, i0, in_q, visible, DIM, True, PRECISION)
                    poison(p_dv, wide(o_j) * dv.row, in_k, p_do, dout.row, i0, in_q, visible, DIM_V, False, PRECISION)


@triton.jit
def dscores_tile(
    b_q,
    b_do,
    L,
    D,
    o_i,
    in_q,
    j0,
    k_len,
    k,
    v,
    k_desc,
    v_desc,
    k_head,
    k_start,
    h,
    rule,
    sequence,
    offset,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dS of one tile, [br, bc], before and after softcap's slope, and the keys."""
    BLOCK_Q: tl.constexpr = b_q.shape[0]
    BLOCK_D: tl.constexpr = b_q.shape[1]
    BLOCK_DV: tl.constexpr = b_do.shape[1]
    o_j = j0 + tl.arange(0, BLOCK_K)
    in_k = o_j < k_len
    first = k_start + j0
    b_k = load_block(k, k_desc, sequence, k_head, first, in_k, BLOCK_K, DIM, BLOCK_D, MASKED)
    b_v = load_block(v, v_desc, sequence, k_head, first, in_k, BLOCK_K, DIM_V, BLOCK_DV, MASKED)
    zero = tl.zeros([BLOCK_Q, BLOCK_K], D.dtype)
    S = dot(b_q, tl.trans(b_k), zero, PRECISION)
    inside = in_q[:, None] & in_k[None, :]
    P, slope, visible = weights(S, L[:, None], rule, o_i[:, None], o_j[None, :], h, inside, sequence, offset, MASKED)
    dP = dot(b_do, tl.trans(b_v), zero, PRECISION)  # eq. 11
    if rule.seed is not None:
        keep = kept(rule, sequence, h, o_i[:, None], j0, BLOCK_Q, BLOCK_K)
        dP = tl.where(keep, dP * number(rule.keep_scale, P.dtype), 0.0)
    dS, dS_bent = dscores(P, dP, D[:, None], slope, visible, rule, MASKED or rule.mask is not None)
    return dS, dS_bent, b_k


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    dout,
    k_desc,
    v_desc,
    lse,
    delta,
    dq,
    rule,
    lengths,
    GROUP: tl.constexpr,
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
    """A program owns BLOCK_Q queries of one head and walks the keys they see."""
    h = tl.program_id(1)
    reverse = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, tile = locate(lengths.cu_q, reverse, tl.program_id(2), lengths.sequences, BLOCK_Q)
    q_start, q_len, k_start, _, k_len, offset = measure(lengths, rule.offset, sequence)
    i0 = tile * BLOCK_Q
    if i0 < q_len:
        o_r = tl.arange(0, BLOCK_Q)
        o_i = i0 + o_r
        in_q = o_i < q_len
        o_d = tl.arange(0, BLOCK_D)
        b_q = load_block(q, None, sequence, h, q_start + i0, in_q, BLOCK_Q, DIM, BLOCK_D, True)
        b_do = load_block(dout, None, sequence, h, q_start + i0, in_q, BLOCK_Q, DIM_V, BLOCK_DV, True)
        p_lse = base(lse, sequence, h, q_start)
        p_delta = base(delta, sequence, h, q_start)
        L, D = load_statistics(p_lse, p_delta, lse.row, delta.row, i0, o_r, in_q)
        b_dq = tl.zeros([BLOCK_Q, BLOCK_D], REAL)
        last = tl.minimum(i0 + BLOCK_Q, q_len)
        cut = cuts(rule.left, rule.right, offset, i0, last, k_len, BLOCK_K)
        again = tl.zeros([], tl.int1)
        for n in tl.static_range(FIRST_STRETCH, 4):
            if n == 3:
                again = spoiled(b_dq)
                b_dq = anew(again, b_dq)
            begin, end = stretch_of(cut, again, n)
            for j in range(begin, end):
                _straight, dS, b_k = dscores_tile(
                    b_q,
                    b_do,
                    L,
                    D,
                    o_i,
                    in_q,
                    j * BLOCK_K,
                    k_len,
                    k,
                    v,
                    k_desc,
                    v_desc,
                    h // GROUP,
                    k_start,
                    h,
                    rule,
                    sequence,
                    offset,
                    DIM,
                    DIM_V,
                    BLOCK_K,
                    n != 1,
                    PRECISION,
                )
                b_dq = dot(dS.to(b_k.dtype), finite_part(b_k, n == 3), b_dq, PRECISION)
        b_dq *= number(rule.scale, REAL)  # eq. 13
        store_block(base(dq, sequence, h, q_start), dq.row, i0, o_r, o_d, in_q, DIM, b_dq)
        if again:
            tl.debug_barrier()
            p_dq = base(dq, sequence, h, q_start)
            p_k = base(k, sequence, h // GROUP, k_start)
            for j in range(cut[0], cut[3]):
                o_j = j * BLOCK_K + tl.arange(0, BLOCK_K)
                in_k = o_j < k_len
                inside = in_q[:, None] & in_k[None, :]
                visible = visible_pairs(rule, o_i[:, None], o_j[None, :], h, inside, sequence, offset, True)
                poison(p_dq, wide(o_i) * dq.row, in_q, p_k, k.row, j * BLOCK_K, in_k, visible, DIM, True, PRECISION)


@triton.jit
def dbias_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dbias,
    rule,
    lengths,
    heads,
    n_rows,
    n_keys,
    SHARE_SEQUENCES: tl.constexpr,
    SHARE_HEADS: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    SHARE_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    REAL: tl.constexpr,
):
    """A program owns a tile of dbias and adds up dS over all that share it, always in the same order."""
    o_r = tl.arange(0, BLOCK_Q)
    o_c = tl.arange(0, BLOCK_K)
    first_sequence = 0 if SHARE_SEQUENCES else tl.program_id(2) // (1 if SHARE_HEADS else heads)
    last_sequence = lengths.sequences if SHARE_SEQUENCES else first_sequence + 1
    first_head = 0 if SHARE_HEADS else tl.program_id(2) % heads
    last_head = heads if SHARE_HEADS else first_head + 1
    first_i = 0 if SHARE_ROWS else tl.program_id(0)
    last_i = tl.cdiv(lengths.n_q, BLOCK_Q) if SHARE_ROWS else first_i + 1
    first_j = 0 if SHARE_KEYS else tl.program_id(1)
    last_j = tl.cdiv(lengths.n_k, BLOCK_K) if SHARE_KEYS else first_j + 1
    total = tl.zeros([BLOCK_Q, BLOCK_K], REAL)
    for sequence in range(first_sequence, last_sequence):
        q_start, q_len, k_start, _, k_len, offset = measure(lengths, rule.offset, sequence)
        for h in range(first_head, last_head):
            for i in range(first_i, tl.minimum(last_i, tl.cdiv(q_len, BLOCK_Q))):
                i0 = i * BLOCK_Q
                o_i = i0 + o_r
                in_q = o_i < q_len
                b_q = load_block(q, None, sequence, h, q_start + i0, in_q, BLOCK_Q, DIM, BLOCK_D, True)
                b_do = load_block(dout, None, sequence, h, q_start + i0, in_q, BLOCK_Q, DIM_V, BLOCK_DV, True)
                p_lse = base(lse, sequence, h, q_start)
                p_delta = base(delta, sequence, h, q_start)
                L, D = load_statistics(p_lse, p_delta, lse.row, delta.row, i0, o_r, in_q)
                last = tl.minimum(i0 + BLOCK_Q, q_len)
                cut = cuts(rule.left, rule.right, offset, i0, last, k_len, BLOCK_K)
                for j in range(tl.maximum(first_j, cut[0]), tl.minimum(last_j, cut[3])):
                    dS, _bent, _keys = dscores_tile(
                        b_q,
                        b_do,
                        L,
                        D,
                        o_i,
                        in_q,
                        j * BLOCK_K,
                        k_len,
                        k,
                        v,
                        None,
                        None,
                        h // GROUP,
                        k_start,
                        h,
                        rule,
                        sequence,
                        offset,
                        DIM,
                        DIM_V,
                        BLOCK_K,
                        True,
                        PRECISION,
                    )
                    total += dS
    if SHARE_ROWS:
        total = tl.broadcast_to(tl.sum(total, 0)[None, :], [BLOCK_Q, BLOCK_K])
    if SHARE_KEYS:
        total = tl.broadcast_to(tl.sum(total, 1)[:, None], [BLOCK_Q, BLOCK_K])
    o_i = tl.program_id(0) * BLOCK_Q + o_r
    o_j = tl.program_id(1) * BLOCK_K + o_c
    there = (o_i < n_rows)[:, None] & (o_j < n_keys)[None, :]
    p_dbias = pair_pointers(
        dbias.ptr,
        dbias.sequence,
        dbias.head,
        dbias.row,
        dbias.column,
        first_sequence,
        first_head,
        o_i[:, None],
        o_j[None, :],
    )
    tl.store(p_dbias, total, mask=there)
