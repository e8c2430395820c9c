"""Rows of the output: a tile of queries walks the keys that it sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.blocks import from_bits, head_of, load_rows, to_int64, widen_8_bits
from flashtile.backends.gpu.cuts import stretch_of, tile_at, within
from flashtile.backends.gpu.nonfinite_rows import finite_part, has_nonfinite, poison
from flashtile.backends.gpu.scores import (
    LN2,
    LOG2E,
    Tile,
    dot,
    exp2_of,
    kept,
    least,
    log_sum_exp,
    shape_scores,
    visible_pairs,
)
from flashtile.backends.gpu.spans import cuts_of_rows

# The factor of weights on the careful walk: a sum of values near the largest number may be infinite although their mean
# is finite. float16 has neither such values nor such weights.
SHRINK = tl.constexpr(2.0**-32)


class Queries(NamedTuple):
    """The rows of a tile: the query and the head of each, and whether it exists."""

    o_i: Any
    o_h: Any
    inside: Any


@triton.jit
def pairs_of(queries, at, j0, BLOCK_K: tl.constexpr):
    """The tile of these queries and BLOCK_K keys from j0 on."""
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
    CAREFUL: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Take in one tile of keys: eq. 4 and 5 of docs/algorithm.md, in base 2; HALVES: m is half the maximum."""
    b_k = widen_8_bits(load_rows(keys, k_desc, j0, C.BLOCK_K, C.DIM, C.BLOCK_D, MASKED))  # [bc, d]
    b_v = widen_8_bits(load_rows(values, v_desc, j0, C.BLOCK_K, C.DIM_V, C.BLOCK_DV, MASKED))
    S = dot(b_q, tl.trans(b_k), tl.zeros([C.BLOCK_Q, C.BLOCK_K], C.REAL), C.PRECISION)  # [br, bc]
    if rule.descale is not None:
        S *= descale(rule, at, keys, 0) * descale(rule, at, keys, 1)
    tile = pairs_of(queries, at, j0, C.BLOCK_K)
    S, unit, _slope = shape_scores(S, rule, tile)
    if HALVES:  # rounded before the maximum is taken off: then the largest score has weight 1, however large it is
        S = S * (unit * 0.5)
        unit = unit * 0 + 1
    if MASKED or rule.mask is not None:
        S = tl.where(visible_pairs(rule, tile, MASKED), S, float("-inf"))
    highest = tl.max(S, 1)
    top = highest * unit
    if rule.bias is not None and not HALVES:  # a bias of finfo.min overflows: such a row is lost, not empty
        top = tl.where(highest > float("-inf"), tl.maximum(top, least(C.REAL)), top)
    m_new = tl.maximum(m, top)
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    P = exp2_of(S * unit - pivot[:, None], HALVES)
    factor = exp2_of(m - pivot, HALVES)
    l = l * factor + tl.sum(P, 1)
    acc = acc * factor[:, None]
    if CAREFUL and b_v.dtype != tl.float16:
        P *= SHRINK
    if rule.seed_low is not None:
        P *= kept(rule, at.sequence, tile.o_h, tile.o_i, j0, C.BLOCK_Q, C.BLOCK_K).to(C.REAL)
    return m_new, l, dot(P.to(b_v.dtype), finite_part(b_v, CAREFUL), acc, C.PRECISION)


@triton.jit
def forward_rows(
    q,
    k,
    v,
    k_desc,
    v_desc,
    out,
    lse,
    p_sink,
    rule,
    at,
    head,
    first,
    split,
    share,
    out_split,
    lse_split,
    PACKED_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Compute and store BLOCK_Q rows of the output from `first` on; return whether any of them may be spoiled.

    CAREFUL: see nonfinite_rows.py. share: the range of keys that a split walks.
    """
    n_rows = at.q_len * PACKED_HEADS
    r = first + tl.arange(0, C.BLOCK_Q)
    queries = Queries(r // PACKED_HEADS, head * PACKED_HEADS + r % PACKED_HEADS, r < n_rows)
    o_d = tl.arange(0, C.BLOCK_D)
    p_q = row_pointers(q, queries, at)[:, None] + o_d[None, :]
    b_q = widen_8_bits(tl.load(p_q, mask=queries.inside[:, None] & (o_d < C.DIM)[None, :], other=0.0))
    k_head = head * PACKED_HEADS // C.GROUP
    keys = head_of(k, at.sequence, k_head, at.k_start, at.k_len)
    values = head_of(v, at.sequence, k_head, at.k_start, at.k_len)
    # A bias may well hide a whole share of the keys, which is no reason to walk it a second time.
    HALVES: tl.constexpr = CAREFUL or (SPLITS > 1 and rule.bias is not None)
    m, l = begin_rows(p_sink, queries.o_h, queries.inside & (split == 0), C.REAL, HALVES)
    acc = tl.zeros([C.BLOCK_Q, C.BLOCK_DV], C.REAL)
    cut = cuts_of_rows(rule, at, head, first, PACKED_HEADS, C.BLOCK_Q, C.BLOCK_K)
    if SPLITS > 1:
        cut = within(cut, share[0] // C.BLOCK_K, share[1] // C.BLOCK_K)
    TWO_ENDS: tl.constexpr = rule.left is not None or rule.spans is not None
    for n in tl.static_range(2 if CAREFUL else 0, 3 if CAREFUL else 2):
        begin, end = stretch_of(cut, n, TWO_ENDS)
        for place in range(begin, end):
            j0 = tile_at(cut, place, n, TWO_ENDS) * C.BLOCK_K
            m, l, acc = absorb(
                *(m, l, acc, b_q, queries, keys, values, k_desc, v_desc, j0, rule, at, C),
                MASKED=n > 0,
                CAREFUL=CAREFUL,
                HALVES=HALVES,
            )
    weight = 1 / tl.where(l == 0, 1.0, l)  # eq. 7
    if CAREFUL and v.ptr.dtype.element_ty != tl.float16:
        weight /= SHRINK
    if rule.seed_low is not None:
        weight *= from_bits(rule.keep_scale, C.REAL)
    if rule.descale is not None:
        weight *= descale(rule, at, values, 2)
    o_v = tl.arange(0, C.BLOCK_DV)
    p_out = row_pointers(out, queries, at) + to_int64(split) * out_split
    there = queries.inside[:, None] & (o_v < C.DIM_V)[None, :]
    tl.store(p_out[:, None] + o_v[None, :], (acc * weight[:, None]).to(out.ptr.dtype.element_ty), mask=there)
    p_lse = row_pointers(lse, queries, at) + to_int64(split) * lse_split
    if SPLITS > 1:  # as two numbers: next to a large maximum, their sum would round log(l) away
        tl.store(p_lse, m if HALVES else m * 0.5, mask=queries.inside)
        tl.store(p_lse + to_int64(SPLITS) * lse_split, l, mask=queries.inside)
    elif HALVES:
        tl.store(p_lse, tl.where(l == 0, float("-inf"), log_sum_exp(m, l)), mask=queries.inside)
    else:
        tl.store(p_lse, tl.where(l == 0, float("-inf"), m * LN2 + tl.log(l)), mask=queries.inside)
    if CAREFUL:
        tl.debug_barrier()
        begin, end = stretch_of(cut, 2, TWO_ENDS)
        for place in range(begin, end):
            j0 = tile_at(cut, place, 2, TWO_ENDS) * C.BLOCK_K
            tile = pairs_of(queries, at, j0, C.BLOCK_K)
            visible = visible_pairs(rule, tile, True)
            if rule.seed_low is not None:
                keep = kept(rule, at.sequence, tile.o_h, tile.o_i, j0, C.BLOCK_Q, C.BLOCK_K)
                poison(p_out, queries.inside, values, j0, visible & (keep == 0), C.DIM_V, True, C)
                visible = visible & keep
            poison(p_out, queries.inside, values, j0, visible, C.DIM_V, False, C)
    return has_nonfinite(acc) | lost(m, l)


@triton.jit
def recompute_forward_rows(
    q,
    k,
    v,
    out,
    lse,
    p_sink,
    rule,
    at,
    head,
    first,
    split,
    share,
    out_split,
    lse_split,
    ROWS: tl.constexpr,
    PACKED_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
):
    """Recompute ROWS rows from `first` on by the careful walk, BLOCK_Q of them at a time."""
    for part in range(first, tl.minimum(first + ROWS, at.q_len * PACKED_HEADS), C.BLOCK_Q):
        forward_rows(
            *(q, k, v, None, None, out, lse, p_sink, rule, at, head, part, split, share, out_split, lse_split),
            *(PACKED_HEADS, SPLITS, C),
            CAREFUL=True,
        )


@triton.jit
def descale(rule, at, of, n):
    """The descaling factor of q, k or v (n = 0, 1 or 2) of a head."""
    return tl.load(rule.descale + at.sequence * rule.descale_sequence + of.head * rule.descale_head + n)


@triton.jit
def row_pointers(x, queries, at):
    """A pointer to each row of the tile in x."""
    p = x.ptr + to_int64(at.sequence) * x.sequence + to_int64(at.q_start) * x.row
    return p + to_int64(queries.o_h) * x.head + to_int64(queries.o_i) * x.row


@triton.jit
def lost(m, l):
    """Whether any row that saw a key has no usable sum: its scores were too large for the rounding of an FMA."""
    return tl.max(((l - l != 0) | ((l == 0) & (m > float("-inf")))).to(tl.int32), 0) > 0


@triton.jit
def begin_rows(p_sink, o_h, has_sink, REAL: tl.constexpr, HALVES: tl.constexpr):
    """m (half of it if HALVES) and l before the first key. A sink is a key whose value is 0."""
    m = tl.full(o_h.shape, float("-inf"), REAL)
    if p_sink is not None:
        # != 0: combined with a scalar, a boolean is no mask to the interpreter of Triton 3.8 and later.
        m = tl.load(p_sink + o_h, mask=has_sink != 0, other=float("-inf")).to(REAL) * (LOG2E / 2 if HALVES else LOG2E)
    return m, tl.where(m == float("-inf"), 0.0, 1.0).to(REAL)
