"""The forward kernel: a tile of queries walks the keys it sees. With SPLITS, each program walks a share of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.triton.blocks import head_of, load_rows, locate, measure, number, wide
from flashtile.backends.triton.cuts import cuts, reach, stretch_of
from flashtile.backends.triton.guard import anew, finite_part, poison, spoiled
from flashtile.backends.triton.scores import LN2, LOG2E, Tile, dot, kept, shape_scores, visible_pairs


class Queries(NamedTuple):
    """The rows of a tile: which query and which head each is, and whether it is real."""

    o_i: Any
    o_h: Any
    inside: Any


@triton.jit
def tile_of(queries, at, j0, BLOCK_K: tl.constexpr):
    """Queries against BLOCK_K keys from j0 on."""
    o_j = j0 + tl.arange(0, BLOCK_K)[None, :]
    o_i, o_h, real = queries.o_i[:, None], queries.o_h[:, None], queries.inside[:, None]
    return Tile(o_i, o_j, o_h, real, at.k_len, at.sequence, at.offset)


@triton.jit
def absorb(
    m,
    l,
    acc,
    b_q,
    queries,
    keys,
    values,
    k_desc,
    v_desc,
    j0,
    rule,
    at,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    GUARD: tl.constexpr,
):
    """Take in one tile of keys: eq. 4 and 5 of docs/algorithm.md, in base 2."""
    b_k = load_rows(keys, k_desc, j0, C.BLOCK_K, C.DIM, C.BLOCK_D, MASKED)  # [bc, d]
    b_v = load_rows(values, v_desc, j0, C.BLOCK_K, C.DIM_V, C.BLOCK_DV, MASKED)
    S = dot(b_q, tl.trans(b_k), tl.zeros([C.BLOCK_Q, C.BLOCK_K], C.REAL), C.PRECISION)  # [br, bc]
    tile = tile_of(queries, at, j0, C.BLOCK_K)
    S, unit, _slope = shape_scores(S, rule, tile)
    if GUARD:  # rounded before the maximum is taken off: then the largest score has weight 1, however large it is
        S = S * unit
        unit = unit * 0 + 1
    if MASKED or rule.mask is not None:
        S = tl.where(visible_pairs(rule, tile, MASKED), S, float("-inf"))
    m_new = tl.maximum(m, tl.max(S, 1) * unit)
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    P = tl.exp2(S * unit - pivot[:, None])
    factor = tl.exp2(m - pivot)
    l = l * factor + tl.sum(P, 1)
    acc = acc * factor[:, None]
    if rule.seed_low is not None:
        P *= kept(rule, at.sequence, tile.o_h, tile.o_i, j0, C.BLOCK_Q, C.BLOCK_K).to(C.REAL)
    return m_new, l, dot(P.to(b_v.dtype), finite_part(b_v, GUARD), acc, C.PRECISION)


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
    tiles,
    heads,
    out_split,
    lse_split,
    PACKED_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
):
    """A program makes BLOCK_Q rows of the output. PACKED_HEADS query heads of a group share the rows of a tile.

    The grid counts tiles, then `heads` (of them packed), then shares of the keys, then sequences.
    """
    program = tl.program_id(0)
    head = program // tiles % heads
    split = program // tiles // heads % SPLITS
    # Under a causal band the last rows see the most keys: they start first.
    sequence, row = locate(
        lengths.cu_q, tiles - 1 - program % tiles, program // tiles // heads // SPLITS, lengths.sequences, C.BLOCK_Q
    )
    at = measure(lengths, rule.offset, sequence)
    n_rows = at.q_len * PACKED_HEADS
    first = row * C.BLOCK_Q
    if first < n_rows:
        r = first + tl.arange(0, C.BLOCK_Q)
        queries = Queries(r // PACKED_HEADS, head * PACKED_HEADS + r % PACKED_HEADS, r < n_rows)
        o_d = tl.arange(0, C.BLOCK_D)
        p_q = row_pointers(q, queries, at)[:, None] + o_d[None, :]
        b_q = tl.load(p_q, mask=queries.inside[:, None] & (o_d < C.DIM)[None, :], other=0.0)
        k_head = head * PACKED_HEADS // C.GROUP
        keys = head_of(k, sequence, k_head, at.k_start, at.k_len)
        values = head_of(v, sequence, k_head, at.k_start, at.k_len)
        has_sink = queries.inside & (split == 0)
        m, l = begin_rows(p_sink, queries.o_h, has_sink, C.REAL)
        acc = tl.zeros([C.BLOCK_Q, C.BLOCK_DV], C.REAL)
        last = (tl.minimum(first + C.BLOCK_Q, n_rows) - 1) // PACKED_HEADS + 1
        cut = cuts(reach(rule.left), reach(rule.right), at.offset, first // PACKED_HEADS, last, at.k_len, C.BLOCK_K)
        if SPLITS > 1:
            cut = share_of(cut, split, SPLITS)
        again = tl.zeros([], tl.int1)
        for n in tl.static_range(1 if rule.left is None else 0, 4):
            if n == 3:
                again = spoiled(acc) | lost(m, l)
                m_first, l_first = begin_rows(p_sink, queries.o_h, has_sink, C.REAL)
                m = tl.where(again, m_first, m)
                l = tl.where(again, l_first, l)
                acc = anew(again, acc)
            begin, end = stretch_of(cut, again, n)
            for j in range(begin, end):
                j0 = j * C.BLOCK_K
                m, l, acc = absorb(
                    m, l, acc, b_q, queries, keys, values, k_desc, v_desc, j0, rule, at, C, MASKED=n != 1, GUARD=n == 3
                )
        weight = 1 / tl.where(l == 0, 1.0, l)  # eq. 7
        if rule.seed_low is not None:
            weight *= number(rule.keep_scale, C.REAL)
        o_v = tl.arange(0, C.BLOCK_DV)
        p_out = row_pointers(out, queries, at) + wide(split) * out_split
        there = queries.inside[:, None] & (o_v < C.DIM_V)[None, :]
        tl.store(p_out[:, None] + o_v[None, :], (acc * weight[:, None]).to(out.ptr.dtype.element_ty), mask=there)
        p_lse = row_pointers(lse, queries, at) + wide(split) * lse_split
        if SPLITS > 1:  # in two parts: their sum would round away what a large maximum leaves of log(l)
            tl.store(p_lse, m, mask=queries.inside)
            tl.store(p_lse + wide(SPLITS) * lse_split, l, mask=queries.inside)
        else:
            tl.store(p_lse, tl.where(l == 0, float("-inf"), m * LN2 + tl.log(l)), mask=queries.inside)
        if again:
            tl.debug_barrier()
            for j in range(cut[0], cut[3]):
                j0 = j * C.BLOCK_K
                tile = tile_of(queries, at, j0, C.BLOCK_K)
                visible = visible_pairs(rule, tile, True)
                if rule.seed_low is not None:
                    keep = kept(rule, sequence, tile.o_h, tile.o_i, j0, C.BLOCK_Q, C.BLOCK_K)
                    poison(p_out, queries.inside, values, j0, visible & (keep == 0), C.DIM_V, True, C)
                    visible = visible & keep
                poison(p_out, queries.inside, values, j0, visible, C.DIM_V, False, C)


@triton.jit
def row_pointers(x, queries, at):
    """Where each row of the tile begins in x."""
    p = x.ptr + wide(at.sequence) * x.sequence + wide(at.q_start) * x.row
    return p + wide(queries.o_h) * x.head + wide(queries.o_i) * x.row


@triton.jit
def lost(m, l):
    """Whether any row that saw a key has no sum to divide by: its scores were too large for the rounding of an FMA."""
    return tl.max(((l - l != 0) | ((l == 0) & (m > float("-inf")))).to(tl.int32), 0) > 0


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
