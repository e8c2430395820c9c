"""The backward kernels: row statistics, dK and dV by key tiles, dQ by query tiles, dbias. No atomics.

Weights are recomputed from the lse, a single number: for scores of 1e9 it keeps the maximum and loses the sum. The lse
of such a row becomes NaN, which spoils all tiles that the row contributes to, so that they are recomputed from its
maximum (its top) and its sum as two numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.backward_rows import dkdv_rows, dq_rows, dscores_tile, load_statistics, row_statistics
from flashtile.backends.gpu.blocks import (
    head_of,
    load_rows,
    locate,
    sequence_bounds,
    store_per_row,
    tile_of,
    to_int64,
)
from flashtile.backends.gpu.cuts import stretch_of, tile_at, within
from flashtile.backends.gpu.pdl import launch_dependents, wait_for_previous
from flashtile.backends.gpu.scores import pair_pointers
from flashtile.backends.gpu.spans import cuts_of_rows
from flashtile.backends.gpu.unspecialized import plain


@triton.jit(do_not_specialize=["n_rows", "heads"])
def statistics_kernel(
    dout,
    out,
    lse,
    dlse,
    log2,
    delta,
    tops,
    n_rows,
    heads,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the statistics of each row: lse in base 2, delta = rowsum(dO * O) - dL, and a top of 0 until it is known.

    The grid counts blocks of rows, then heads.
    """
    launch_dependents(PDL)
    blocks = tl.cdiv(n_rows, BLOCK)
    first = tl.program_id(0) % blocks * BLOCK
    head = tl.program_id(0) // blocks % heads
    sequence = tl.program_id(0) // blocks // heads
    L, D = row_statistics(dout, out, lse, dlse, sequence, head, 0, n_rows, first, DIM_V, BLOCK_DV, BLOCK, LARGE)
    store_per_row(head_of(log2, sequence, head, 0, n_rows), first, L)
    store_per_row(head_of(delta, sequence, head, 0, n_rows), first, D)
    store_per_row(head_of(tops, sequence, head, 0, n_rows), first, tl.zeros([BLOCK], L.dtype))


@triton.jit(do_not_specialize=["tiles", "heads"])
def row_cuts_kernel(row_cuts, rule, lengths, tiles, heads, CUT_Q: tl.constexpr, CUT_K: tl.constexpr):
    """Store the cuts of a row of tiles per program, which dkdv_kernel needs: it walks the rows that visit its keys.

    The grid counts rows of tiles, then heads, then sequences. row_cuts: see row_cuts_of().
    """
    program = tl.program_id(0)
    h, tile, at = tile_of(program, tiles, heads, lengths.cu_q, lengths.n_q, rule, lengths, CUT_Q)
    cut = cuts_of_rows(rule, at, h, tile * CUT_Q, 1, CUT_Q, CUT_K)
    is_whole = (tile + 1) * CUT_Q <= at.q_len
    p = row_cuts.ptr + to_int64(program // tiles * len(cut)) * tiles + program % tiles
    for n in tl.static_range(len(cut)):
        # dkdv_kernel masks queries beyond the last one only in partial tiles.
        value = cut[n] if n % 4 != 2 else tl.where(is_whole, cut[n], cut[n - 1])
        tl.store(p + n * tiles, value)


@triton.jit(do_not_specialize=["tiles", "kv_heads"])
def dkdv_kernel(
    q,
    k,
    v,
    dout,
    q_desc,
    do_desc,
    log2,
    delta,
    dk,
    dv,
    flags,
    row_cuts,
    rule,
    lengths,
    tiles,
    kv_heads,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute dK and dV of BLOCK_K keys of a key head per program, walking the queries of the group that see them.

    Spoiled tiles are flagged for recompute_backward_kernel.
    """
    wait_for_previous(PDL)
    launch_dependents(PDL)  # after the wait, so that dq_kernel finds the statistics complete too
    program = tl.program_id(0)
    head, tile, at = tile_of(program, tiles, kv_heads, lengths.cu_k, lengths.n_k, rule, lengths, C.BLOCK_K)
    j0 = tile * C.BLOCK_K
    if j0 < at.k_rows:
        bad = dkdv_rows(
            *(q, k, v, dout, q_desc, do_desc, log2, delta, None, dk, dv, row_cuts, rule, at, head, j0, C),
            *(C.BLOCK_Q, C.BLOCK_K),
            CAREFUL=False,
        )
        tl.store(flags + program, bad.to(tl.int32))
    else:
        tl.store(flags + program, 0)


@triton.jit(do_not_specialize=["first_flag", "tiles", "heads"])
def dq_kernel(
    q,
    k,
    v,
    dout,
    k_desc,
    v_desc,
    log2,
    delta,
    dq,
    flags,
    first_flag,
    rule,
    lengths,
    tiles,
    heads,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute dQ of BLOCK_Q queries of a head per program, walking the keys that they see. Spoiled tiles are flagged.

    With PDL it begins beside the last programs of dkdv_kernel, which waited for the statistics and accesses nothing
    that is written here. One program waits for dkdv_kernel, so that this kernel does not complete first.
    """
    launch_dependents(PDL)
    program = tl.program_id(0)
    h = program // tiles % heads
    tile = tiles - 1 - program % tiles  # see forward_kernel
    p_flag = flags + first_flag + program // tiles * tiles + tile
    sequence, tile = locate(lengths.cu_q, lengths.n_q, tile, program // tiles // heads, lengths, C.BLOCK_Q)
    at = sequence_bounds(lengths, rule.offset, sequence)
    i0 = tile * C.BLOCK_Q
    if i0 < at.q_len:
        bad = dq_rows(q, k, v, dout, k_desc, v_desc, log2, delta, None, dq, rule, at, h, i0, C, CAREFUL=False)
        tl.store(p_flag, bad.to(tl.int32))
    else:
        tl.store(p_flag, 0)
    if program == tl.num_programs(0) - 1:
        wait_for_previous(PDL)


@triton.jit(do_not_specialize=["heads", "n_rows"])
def dbias_kernel(
    q,
    k,
    v,
    dout,
    log2,
    delta,
    tops,
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
    C: tl.constexpr,
):
    """Compute a tile of dbias per program: the sum of dS over all that share it, always in the same order.

    The grid counts tiles of keys, then of queries, then heads, then sequences; a shared axis counts once.
    """
    across = tl.cdiv(n_keys, C.BLOCK_K)
    down = tl.cdiv(n_rows, C.BLOCK_Q)
    column = tl.program_id(0) % across
    row = tl.program_id(0) // across % down
    rest = tl.program_id(0) // across // down
    first_sequence = 0 if SHARE_SEQUENCES else rest // (1 if SHARE_HEADS else heads)
    last_sequence = plain(lengths.sequences) if SHARE_SEQUENCES else first_sequence + 1
    first_head = 0 if SHARE_HEADS else rest % heads
    last_head = heads if SHARE_HEADS else first_head + 1
    first_i = 0 if SHARE_ROWS else row
    last_i = tl.cdiv(plain(lengths.n_q), C.BLOCK_Q) if SHARE_ROWS else first_i + 1
    first_j = 0 if SHARE_KEYS else column
    last_j = tl.cdiv(plain(lengths.n_k), C.BLOCK_K) if SHARE_KEYS else first_j + 1
    total = tl.zeros([C.BLOCK_Q, C.BLOCK_K], C.REAL)
    for sequence in range(first_sequence, last_sequence):
        at = sequence_bounds(lengths, rule.offset, sequence)
        for h in range(first_head, last_head):
            queries = head_of(q, sequence, h, at.q_start, at.q_len)
            douts = head_of(dout, sequence, h, at.q_start, at.q_len)
            p_log2 = head_of(log2, sequence, h, at.q_start, at.q_len)
            p_delta = head_of(delta, sequence, h, at.q_start, at.q_len)
            keys = head_of(k, sequence, h // C.GROUP, at.k_start, at.k_len)
            values = head_of(v, sequence, h // C.GROUP, at.k_start, at.k_len)
            for i in range(first_i, tl.minimum(last_i, tl.cdiv(at.q_len, C.BLOCK_Q))):
                i0 = i * C.BLOCK_Q
                b_q = load_rows(queries, None, i0, C.BLOCK_Q, C.DIM, C.BLOCK_D, True)
                b_do = load_rows(douts, None, i0, C.BLOCK_Q, C.DIM_V, C.BLOCK_DV, True)
                L, D = load_statistics(p_log2, p_delta, i0, C.BLOCK_Q, True)
                cut = cuts_of_rows(rule, at, h, i0, 1, C.BLOCK_Q, C.BLOCK_K)
                begin, end = tl.maximum(first_j, cut[0]), tl.minimum(last_j, cut[3])
                if rule.spans is not None:
                    cut = within(cut, first_j, last_j)
                    begin, end = stretch_of(cut, 2, True)
                for place in range(begin, end):
                    j0 = tile_at(cut, place, 2, True) * C.BLOCK_K
                    dS, _bent, _keys = dscores_tile(
                        b_q, b_do, L, D, tops, keys, values, None, None, i0, j0, h, rule, at, C, MASKED=True
                    )
                    total += dS
    if SHARE_ROWS:
        total = tl.broadcast_to(tl.sum(total, 0)[None, :], [C.BLOCK_Q, C.BLOCK_K])
    if SHARE_KEYS:
        total = tl.broadcast_to(tl.sum(total, 1)[:, None], [C.BLOCK_Q, C.BLOCK_K])
    o_i = (row * C.BLOCK_Q + tl.arange(0, C.BLOCK_Q))[:, None]
    o_j = (column * C.BLOCK_K + tl.arange(0, C.BLOCK_K))[None, :]
    p_dbias = pair_pointers(
        dbias.ptr, dbias.sequence, dbias.head, dbias.row, dbias.column, first_sequence, first_head, o_i, o_j
    )
    tl.store(p_dbias, total, mask=(o_i < n_rows) & (o_j < n_keys))
