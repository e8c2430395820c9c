"""Rows of dK, dV and dQ, and the row statistics that they are computed from."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.blocks import (
    from_bits,
    head_of,
    load_per_row,
    load_rows,
    store_rows,
    to_int64,
)
from flashtile.backends.gpu.cuts import cuts, reach, stretch_of, tile_at
from flashtile.backends.gpu.nonfinite_rows import finite_part, has_nonfinite, poison
from flashtile.backends.gpu.scores import LOG2E, Tile, dot, kept, shape_scores, visible_pairs
from flashtile.backends.gpu.spans import (
    CHUNK,
    chunk_of_visits,
    cuts_of_rows,
    next_visit,
    row_cuts_of,
    visitors,
)


@triton.jit
def row_statistics(
    dout,
    out,
    lse,
    dlse,
    sequence,
    head,
    start,
    length,
    first,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGE: tl.constexpr,
):
    """lse in base 2 and delta of BLOCK rows from `first` on, of the rows start .. start + length of a head.

    An empty row gets lse +inf and delta 0, so its weights are 0. An lse of LARGE or more (unless LARGE is None) is too
    coarse: it becomes NaN, or that of an empty row if the row has no gradient (padding, hidden by a bias of -1e9).
    """
    b_out = load_rows(head_of(out, sequence, head, start, length), None, first, BLOCK, DIM_V, BLOCK_DV, True)
    b_do = load_rows(head_of(dout, sequence, head, start, length), None, first, BLOCK, DIM_V, BLOCK_DV, True)
    L = load_per_row(head_of(lse, sequence, head, start, length), first, BLOCK, 0.0, True)
    D = tl.sum(b_out.to(L.dtype) * b_do.to(L.dtype), 1)
    no_gradient = tl.max((b_do.to(L.dtype) != 0).to(tl.int32), 1) == 0
    if dlse is not None:
        dL = load_per_row(head_of(dlse, sequence, head, start, length), first, BLOCK, 0.0, True)
        D -= dL
        no_gradient = no_gradient & (dL == 0)
    empty = float("-inf") == L
    log2 = L * LOG2E
    if LARGE is not None:
        large = (tl.abs(log2) >= LARGE) & (tl.abs(L) < float("inf"))
        empty = empty | (large & no_gradient)
        log2 = tl.where(large, float("nan"), log2)
    return tl.where(empty, float("inf"), log2), tl.where(empty, 0.0, D)


@triton.jit
def load_statistics(log2, delta, first, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """Load lse in base 2 and delta; rows beyond the last one count as empty."""
    return load_per_row(log2, first, ROWS, float("inf"), RAGGED), load_per_row(delta, first, ROWS, 0.0, RAGGED)


@triton.jit
def weights(S, L, tops, h, i0, rule, at, tile, MASKED: tl.constexpr):
    """Recompute P from the scores and lse (eq. 9). Return it with softcap's slope and the visible pairs.

    S is q.k in either orientation. L belongs to the queries from i0 on. tops: what to subtract from large scores before
    L.
    """
    S, unit, slope = shape_scores(S, rule, tile)
    visible = visible_pairs(rule, tile, MASKED)
    if tops is not None:
        rows = head_of(tops, at.sequence, h, at.q_start, at.q_len)
        top = tl.reshape(load_per_row(rows, i0, L.shape[0] * L.shape[1], 0.0, True), L.shape)
        S = tl.where(visible, S * (unit * 0.5), float("-inf")) - top  # rounded in between, as in row_sums()
        unit = unit * 0 + 2
    P = tl.exp2(S * unit - L)
    if MASKED or rule.mask is not None:
        P = tl.where(visible, P, 0.0)
    return P, slope, visible


@triton.jit
def dscores(P, dP, D, slope, visible, rule, MASKED: tl.constexpr):
    """dS = P * (dP - D), eq. 12, and dS * slope; 0 for pairs that are not visible, whatever dP and slope are."""
    dS = P * (dP - D)
    if MASKED or rule.mask is not None:
        dS = tl.where(visible, dS, 0.0)
    dS_bent = dS
    if rule.softcap is not None:
        dS_bent = dS * slope
        if MASKED or rule.mask is not None:
            dS_bent = tl.where(visible, dS_bent, 0.0)
    return dS, dS_bent


@triton.jit
def transposed_tile(o_j, h, i0, at, BLOCK_Q: tl.constexpr):
    """The tile with keys o_j as rows and BLOCK_Q queries from i0 on as columns."""
    o_i = (i0 + tl.arange(0, BLOCK_Q))[None, :]
    return Tile(o_i, o_j[:, None], h, o_i < at.q_len, at.k_len, at.sequence, at.offset)


@triton.jit
def dkdv_tile(
    b_dk,
    b_dv,
    b_k,
    b_v,
    queries,
    douts,
    q_desc,
    do_desc,
    log2,
    delta,
    tops,
    h,
    i0,
    j0,
    rule,
    at,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Add the contribution of a tile of queries to dK and dV; everything is transposed, [bc, br]."""
    b_q = load_rows(queries, q_desc, i0, C.BLOCK_Q, C.DIM, C.BLOCK_D, MASKED)
    b_do = load_rows(douts, do_desc, i0, C.BLOCK_Q, C.DIM_V, C.BLOCK_DV, MASKED)
    tile = transposed_tile(j0 + tl.arange(0, C.BLOCK_K), h, i0, at, C.BLOCK_Q)
    zero = tl.zeros([C.BLOCK_K, C.BLOCK_Q], C.REAL)
    S = dot(b_k, tl.trans(b_q), zero, C.PRECISION)
    # Rows beyond the last one have no weight and may hold anything; masks would cost more registers than there are.
    L, D = load_statistics(log2, delta, i0, C.BLOCK_Q, CAREFUL)
    P, slope, visible = weights(S, L[None, :], tops, h, i0, rule, at, tile, MASKED)
    dP = dot(b_v, tl.trans(b_do), zero, C.PRECISION)  # eq. 11
    dropped = P
    if rule.seed_low is not None:
        o_i = i0 + tl.arange(0, C.BLOCK_Q)
        keep = tl.trans(kept(rule, at.sequence, h, o_i[:, None], j0, C.BLOCK_Q, C.BLOCK_K))
        factor = tl.where(keep, from_bits(rule.keep_scale, C.REAL), 0.0)
        dropped = P * factor
        dP *= factor
    b_dv = dot(dropped.to(b_do.dtype), finite_part(b_do, CAREFUL), b_dv, C.PRECISION)  # eq. 10
    _straight, dS = dscores(P, dP, D[None, :], slope, visible, rule, MASKED)
    return dot(dS.to(b_q.dtype), finite_part(b_q, CAREFUL), b_dk, C.PRECISION), b_dv  # eq. 14


@triton.jit
def dkdv_rows(
    q,
    k,
    v,
    dout,
    q_desc,
    do_desc,
    log2,
    delta,
    tops,
    dk,
    dv,
    row_cuts,
    rule,
    at,
    head,
    j0,
    C: tl.constexpr,
    CUT_Q: tl.constexpr,
    CUT_K: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Compute and store dK and dV of BLOCK_K keys from j0 on; return whether any of them may be spoiled.

    CAREFUL: see nonfinite_rows.py. row_cuts: with spans, the cuts of each row of tiles of CUT_Q queries and CUT_K keys;
    C has tiles of that size, or parts of them.
    """
    o_j = j0 + tl.arange(0, C.BLOCK_K)
    in_k = o_j < at.k_len
    keys = head_of(k, at.sequence, head, at.k_start, at.k_len)
    values = head_of(v, at.sequence, head, at.k_start, at.k_len)
    b_k = load_rows(keys, None, j0, C.BLOCK_K, C.DIM, C.BLOCK_D, True)
    b_v = load_rows(values, None, j0, C.BLOCK_K, C.DIM_V, C.BLOCK_DV, True)
    b_dk = tl.zeros([C.BLOCK_K, C.BLOCK_D], C.REAL)
    b_dv = tl.zeros([C.BLOCK_K, C.BLOCK_DV], C.REAL)
    # The band with the roles swapped gives the query tiles that see these keys.
    last = tl.maximum(tl.minimum(j0 + C.BLOCK_K, at.k_len), j0 + 1)
    cut = cuts(reach(rule.right), reach(rule.left), -at.offset, j0, last, at.q_len * (j0 < at.k_len), C.BLOCK_Q)
    TWO_ENDS: tl.constexpr = rule.right is not None
    PARTS: tl.constexpr = CUT_Q // C.BLOCK_Q
    for h in range(head * C.GROUP, head * C.GROUP + C.GROUP):
        queries = head_of(q, at.sequence, h, at.q_start, at.q_len)
        douts = head_of(dout, at.sequence, h, at.q_start, at.q_len)
        p_log2 = head_of(log2, at.sequence, h, at.q_start, at.q_len)
        p_delta = head_of(delta, at.sequence, h, at.q_start, at.q_len)
        if row_cuts is None:
            for n in tl.static_range(2 if CAREFUL else 0, 3 if CAREFUL else 2):
                begin, end = stretch_of(cut, n, TWO_ENDS)
                for place in range(begin, end):
                    i0 = tile_at(cut, place, n, TWO_ENDS) * C.BLOCK_Q
                    b_dk, b_dv = dkdv_tile(
                        *(b_dk, b_dv, b_k, b_v),
                        *(queries, douts, q_desc, do_desc, p_log2, p_delta, tops),
                        *(h, i0, j0, rule, at, C),
                        MASKED=n > 0,
                        CAREFUL=CAREFUL,
                    )
        else:
            p_cuts = row_cuts_of(row_cuts, at, h, CUT_Q)
            first, last = visitors(p_cuts, row_cuts.row, tl.cdiv(at.q_len, CUT_Q), j0 // CUT_K, rule.n_spans)
            for t in range(first, last, CHUNK):
                visits = chunk_of_visits(p_cuts, row_cuts.row, t, last, j0 // CUT_K, rule.n_spans)
                for n in tl.static_range(2 if CAREFUL else 0, 3 if CAREFUL else 2):
                    bits = visits[2 * n]
                    for place in range(visits[2 * n + 1] * PARTS):
                        i0, bits = next_visit(bits, t, place, CUT_Q, C.BLOCK_Q)
                        b_dk, b_dv = dkdv_tile(
                            *(b_dk, b_dv, b_k, b_v),
                            *(queries, douts, q_desc, do_desc, p_log2, p_delta, tops),
                            *(h, i0, j0, rule, at, C),
                            MASKED=n > 0,
                            CAREFUL=CAREFUL,
                        )
    bad = has_nonfinite(b_dk) | has_nonfinite(b_dv)
    dkeys = head_of(dk, at.sequence, head, at.k_start, at.k_rows)
    dvalues = head_of(dv, at.sequence, head, at.k_start, at.k_rows)
    b_dk *= from_bits(rule.scale, C.REAL)
    # Keys that are not in use have a gradient of 0.
    store_rows(dkeys, j0, tl.where(in_k[:, None], b_dk, 0.0), C.DIM)
    store_rows(dvalues, j0, tl.where(in_k[:, None], b_dv, 0.0), C.DIM_V)
    if CAREFUL:
        tl.debug_barrier()
        p_dk = dkeys.ptr + to_int64(o_j) * dkeys.row
        p_dv = dvalues.ptr + to_int64(o_j) * dvalues.row
        for h in range(head * C.GROUP, head * C.GROUP + C.GROUP):
            queries = head_of(q, at.sequence, h, at.q_start, at.q_len)
            douts = head_of(dout, at.sequence, h, at.q_start, at.q_len)
            if row_cuts is None:
                for i in range(cut[0], cut[3]):
                    poison_keys(p_dk, p_dv, in_k, queries, douts, h, i * C.BLOCK_Q, j0, rule, at, C)
            else:
                p_cuts = row_cuts_of(row_cuts, at, h, CUT_Q)
                first, last = visitors(p_cuts, row_cuts.row, tl.cdiv(at.q_len, CUT_Q), j0 // CUT_K, rule.n_spans)
                for t in range(first, last, CHUNK):
                    visits = chunk_of_visits(p_cuts, row_cuts.row, t, last, j0 // CUT_K, rule.n_spans)
                    bits = visits[4]
                    for place in range(visits[5] * PARTS):
                        i0, bits = next_visit(bits, t, place, CUT_Q, C.BLOCK_Q)
                        poison_keys(p_dk, p_dv, in_k, queries, douts, h, i0, j0, rule, at, C)
    return bad


@triton.jit
def poison_keys(p_dk, p_dv, in_k, queries, douts, h, i0, j0, rule, at, C: tl.constexpr):
    """Give dK and dV of BLOCK_K keys the NaN and Inf of BLOCK_Q queries from i0 on, and of their gradients."""
    tile = transposed_tile(j0 + tl.arange(0, C.BLOCK_K), h, i0, at, C.BLOCK_Q)
    visible = visible_pairs(rule, tile, True)
    poison(p_dk, in_k, queries, i0, visible, C.DIM, True, C)
    if rule.seed_low is not None:
        o_i = i0 + tl.arange(0, C.BLOCK_Q)
        keep = tl.trans(kept(rule, at.sequence, h, o_i[:, None], j0, C.BLOCK_Q, C.BLOCK_K))
        poison(p_dv, in_k, douts, i0, visible & (keep == 0), C.DIM_V, True, C)
        visible = visible & keep
    poison(p_dv, in_k, douts, i0, visible, C.DIM_V, False, C)


@triton.jit
def query_tile(i0, h, j0, at, C: tl.constexpr):
    """The tile with BLOCK_Q queries from i0 on as rows and BLOCK_K keys from j0 on as columns."""
    o_i = (i0 + tl.arange(0, C.BLOCK_Q))[:, None]
    o_j = (j0 + tl.arange(0, C.BLOCK_K))[None, :]
    return Tile(o_i, o_j, h, o_i < at.q_len, at.k_len, at.sequence, at.offset)


@triton.jit
def dscores_tile(
    b_q, b_do, L, D, tops, keys, values, k_desc, v_desc, i0, j0, h, rule, at, C: tl.constexpr, MASKED: tl.constexpr
):
    """dS of one tile, [br, bc], without and with softcap's slope, and the keys."""
    b_k = load_rows(keys, k_desc, j0, C.BLOCK_K, C.DIM, C.BLOCK_D, MASKED)
    b_v = load_rows(values, v_desc, j0, C.BLOCK_K, C.DIM_V, C.BLOCK_DV, MASKED)
    tile = query_tile(i0, h, j0, at, C)
    zero = tl.zeros([C.BLOCK_Q, C.BLOCK_K], C.REAL)
    S = dot(b_q, tl.trans(b_k), zero, C.PRECISION)
    P, slope, visible = weights(S, L[:, None], tops, h, i0, rule, at, tile, MASKED)
    dP = dot(b_do, tl.trans(b_v), zero, C.PRECISION)  # eq. 11
    if rule.seed_low is not None:
        keep = kept(rule, at.sequence, h, tile.o_i, j0, C.BLOCK_Q, C.BLOCK_K)
        dP *= tl.where(keep, from_bits(rule.keep_scale, C.REAL), 0.0)
    dS, dS_bent = dscores(P, dP, D[:, None], slope, visible, rule, MASKED)
    return dS, dS_bent, b_k


@triton.jit
def dq_rows(
    q,
    k,
    v,
    dout,
    k_desc,
    v_desc,
    log2,
    delta,
    tops,
    dq,
    rule,
    at,
    h,
    i0,
    C: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Compute and store dQ of BLOCK_Q queries from i0 on; return whether any of them may be spoiled.

    CAREFUL: see nonfinite_rows.py.
    """
    o_i = i0 + tl.arange(0, C.BLOCK_Q)
    queries = head_of(q, at.sequence, h, at.q_start, at.q_len)
    douts = head_of(dout, at.sequence, h, at.q_start, at.q_len)
    b_q = load_rows(queries, None, i0, C.BLOCK_Q, C.DIM, C.BLOCK_D, True)
    b_do = load_rows(douts, None, i0, C.BLOCK_Q, C.DIM_V, C.BLOCK_DV, True)
    p_log2 = head_of(log2, at.sequence, h, at.q_start, at.q_len)
    p_delta = head_of(delta, at.sequence, h, at.q_start, at.q_len)
    L, D = load_statistics(p_log2, p_delta, i0, C.BLOCK_Q, True)
    keys = head_of(k, at.sequence, h // C.GROUP, at.k_start, at.k_len)
    values = head_of(v, at.sequence, h // C.GROUP, at.k_start, at.k_len)
    b_dq = tl.zeros([C.BLOCK_Q, C.BLOCK_D], C.REAL)
    cut = cuts_of_rows(rule, at, h, i0, 1, C.BLOCK_Q, C.BLOCK_K)
    TWO_ENDS: tl.constexpr = rule.left is not None or rule.spans is not None
    for n in tl.static_range(2 if CAREFUL else 0, 3 if CAREFUL else 2):
        begin, end = stretch_of(cut, n, TWO_ENDS)
        for place in range(begin, end):
            j0 = tile_at(cut, place, n, TWO_ENDS) * C.BLOCK_K
            _straight, dS, b_k = dscores_tile(
                b_q, b_do, L, D, tops, keys, values, k_desc, v_desc, i0, j0, h, rule, at, C, MASKED=n > 0
            )
            b_dq = dot(dS.to(b_k.dtype), finite_part(b_k, CAREFUL), b_dq, C.PRECISION)
    bad = has_nonfinite(b_dq)
    dqueries = head_of(dq, at.sequence, h, at.q_start, at.q_len)
    store_rows(dqueries, i0, b_dq * from_bits(rule.scale, C.REAL), C.DIM)  # eq. 13
    if CAREFUL:
        tl.debug_barrier()
        p_dq = dqueries.ptr + to_int64(o_i) * dqueries.row
        begin, end = stretch_of(cut, 2, TWO_ENDS)
        for place in range(begin, end):
            j0 = tile_at(cut, place, 2, TWO_ENDS) * C.BLOCK_K
            visible = visible_pairs(rule, query_tile(i0, h, j0, at, C), True)
            poison(p_dq, o_i < at.q_len, keys, j0, visible, C.DIM, True, C)
    return bad


LARGE = {"float32": 2.0**15, "float64": 2.0**12}  # an lse whose rounding changes weights by 1e-3, or by 1e-13
