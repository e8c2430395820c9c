"""The kernels that recompute, by the careful walk, the tiles that the kernels before them flagged.

A flag is an int32, 1 if NaN or Inf spoiled its tile. The index of a flag is (sequence * heads + head) * tiles + tile.
Tiles are counted upwards from the first rows; in packed layouts as locate() counts them, with sequence 0. With ordinary
data no flag is set, and a program ends once it has read its share of the flags.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.backward_rows import dkdv_rows, dq_rows, query_tile
from flashtile.backends.gpu.blocks import head_of, load_per_row, load_rows, store_per_row, tile_of
from flashtile.backends.gpu.cuts import stretch_of, tile_at
from flashtile.backends.gpu.forward_rows import begin_rows, recompute_forward_rows
from flashtile.backends.gpu.pdl import launch_dependents, wait_for_previous
from flashtile.backends.gpu.scores import LOG2E, dot, exp2_of, shape_scores, visible_pairs
from flashtile.backends.gpu.spans import cuts_of_rows

OWN = tl.constexpr(16)  # roundings by which a row's own lse, from another kernel, may differ
FLAGS_AT_ONCE = tl.constexpr(128)  # that a program reads together


@triton.jit
def next_flagged(flags, n, count):
    """The first set flag of a program's share from n on; count or more if there is none.

    Shares are interleaved, so that neighbouring flags belong to different programs.
    """
    step = tl.num_programs(0)
    found = n * 0 + count
    while (n < count) & (found == count):
        o_n = n + tl.arange(0, FLAGS_AT_ONCE) * step
        is_set = tl.load(flags + o_n, mask=o_n < count, other=0) != 0
        found = tl.min(tl.where(is_set, o_n, count), 0)
        n += step * FLAGS_AT_ONCE
    return found


@triton.jit(do_not_specialize=["count", "tiles", "heads"])
def recompute_forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    p_sink,
    flags,
    count,
    rule,
    lengths,
    tiles,
    heads,
    ROWS: tl.constexpr,
    PACKED_HEADS: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Recompute output and lse of flagged tiles of ROWS rows, whichever kernel made them."""
    wait_for_previous(PDL)
    n = next_flagged(flags, tl.program_id(0), count)
    while n < count:
        head, tile, at = tile_of(n, tiles, heads, lengths.cu_q, lengths.n_q, rule, lengths, ROWS)
        recompute_forward_rows(
            *(q, k, v, out, lse, p_sink, rule, at, head, tile * ROWS, 0, (0, at.k_len), 0, 0),
            *(ROWS, PACKED_HEADS, 1, C),
        )
        n = next_flagged(flags, n + tl.num_programs(0), count)


@triton.jit
def row_sums(q, k, lse, log2, tops, p_sink, rule, at, h, i0, C: tl.constexpr):
    """Store half the maximum in base 2 of BLOCK_Q rows from i0 on in tops, and the log2 of their sums in log2.

    The tiles are those of the walk that uses the results, so that scores have the same bits. lse: if it is not None,
    rows whose lse is that of more keys than these get this lse instead, and half a maximum of 0.
    """
    o_i = i0 + tl.arange(0, C.BLOCK_Q)
    b_q = load_rows(head_of(q, at.sequence, h, at.q_start, at.q_len), None, i0, C.BLOCK_Q, C.DIM, C.BLOCK_D, True)
    keys = head_of(k, at.sequence, h // C.GROUP, at.k_start, at.k_len)
    m, l = begin_rows(p_sink, o_i * 0 + h, o_i < at.q_len, C.REAL, True)
    cut = cuts_of_rows(rule, at, h, i0, 1, C.BLOCK_Q, C.BLOCK_K)
    begin, end = stretch_of(cut, 2, True)
    for place in range(begin, end):
        j0 = tile_at(cut, place, 2, True) * C.BLOCK_K
        b_k = load_rows(keys, None, j0, C.BLOCK_K, C.DIM, C.BLOCK_D, True)
        tile = query_tile(i0, h, j0, at, C)
        S = dot(b_q, tl.trans(b_k), tl.zeros([C.BLOCK_Q, C.BLOCK_K], C.REAL), C.PRECISION)
        S, unit, _slope = shape_scores(S, rule, tile)
        S = tl.where(visible_pairs(rule, tile, True), S * (unit * 0.5), float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * exp2_of(m - pivot, True) + tl.sum(exp2_of(S - pivot[:, None], True), 1)
        m = m_new
    empty = m == float("-inf")
    if lse is None:
        store_per_row(head_of(tops, at.sequence, h, at.q_start, at.q_len), i0, tl.where(empty, 0.0, m))
        log_sum = tl.where(empty, float("inf"), tl.log2(l))
    else:
        top, log_sum = tl.where(empty, 0.0, m), tl.where(empty, float("inf"), tl.log2(l))
        L = load_per_row(head_of(lse, at.sequence, h, at.q_start, at.q_len), i0, C.BLOCK_Q, 0.0, True) * LOG2E
        is_own = tl.abs(2 * m + log_sum - L) <= OWN * tl.abs(L) * (2.0**-52 if tl.float64 == C.REAL else 2.0**-23)
        top, log_sum = tl.where(is_own, top, 0.0), tl.where(is_own, log_sum, L)
        store_per_row(head_of(tops, at.sequence, h, at.q_start, at.q_len), i0, top)
    store_per_row(head_of(log2, at.sequence, h, at.q_start, at.q_len), i0, log_sum)


@triton.jit(do_not_specialize=["first_of_queries", "count", "tiles", "heads"])
def recompute_sums_kernel(
    q,
    k,
    lse,
    log2,
    tops,
    p_sink,
    flags,
    first_of_queries,
    count,
    rule,
    lengths,
    tiles,
    heads,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute maximum and sum of rows with an lse of NaN in flagged tiles, for recompute_backward_kernel.

    lse: see row_sums().
    """
    wait_for_previous(PDL)
    launch_dependents(PDL)
    n = next_flagged(flags + first_of_queries, tl.program_id(0), count)
    while n < count:
        h, tile, at = tile_of(n, tiles, heads, lengths.cu_q, lengths.n_q, rule, lengths, ROWS)
        rows = head_of(log2, at.sequence, h, at.q_start, at.q_len)
        for i0 in range(tile * ROWS, tl.minimum((tile + 1) * ROWS, at.q_len), C.BLOCK_Q):
            L = load_per_row(rows, i0, C.BLOCK_Q, 0.0, True)
            if tl.max((L != L).to(tl.int32), 0) > 0:
                row_sums(q, k, lse, log2, tops, p_sink, rule, at, h, i0, C)
        n = next_flagged(flags + first_of_queries, n + tl.num_programs(0), count)


@triton.jit(do_not_specialize=["count", "first_of_queries", "k_tiles", "kv_heads", "q_tiles", "heads"])
def recompute_backward_kernel(
    q,
    k,
    v,
    dout,
    log2,
    delta,
    tops,
    dq,
    dk,
    dv,
    flags,
    row_cuts,
    count,
    first_of_queries,
    rule,
    lengths,
    k_tiles,
    kv_heads,
    q_tiles,
    heads,
    K_ROWS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    CUT_Q: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Recompute flagged tiles: dK and dV of K_ROWS keys, whose flags come first, and dQ of Q_ROWS queries.

    row_cuts: see dkdv_rows(); its tiles have CUT_Q queries and K_ROWS keys.
    """
    wait_for_previous(PDL)
    n = next_flagged(flags, tl.program_id(0), count)
    while n < count:
        if n < first_of_queries:
            head, tile, at = tile_of(n, k_tiles, kv_heads, lengths.cu_k, lengths.n_k, rule, lengths, K_ROWS)
            for j0 in range(tile * K_ROWS, tl.minimum((tile + 1) * K_ROWS, at.k_rows), OF_KEYS.BLOCK_K):
                dkdv_rows(
                    *(q, k, v, dout, None, None, log2, delta, tops, dk, dv, row_cuts, rule, at, head, j0, OF_KEYS),
                    *(CUT_Q, K_ROWS),
                    CAREFUL=True,
                )
        else:
            n_q = n - first_of_queries
            head, tile, at = tile_of(n_q, q_tiles, heads, lengths.cu_q, lengths.n_q, rule, lengths, Q_ROWS)
            for i0 in range(tile * Q_ROWS, tl.minimum((tile + 1) * Q_ROWS, at.q_len), OF_QUERIES.BLOCK_Q):
                dq_rows(
                    *(q, k, v, dout, None, None, log2, delta, tops, dq, rule, at, head, i0, OF_QUERIES),
                    CAREFUL=True,
                )
        n = next_flagged(flags, n + tl.num_programs(0), count)
