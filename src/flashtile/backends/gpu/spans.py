"""The jitted twin of spans.py of the package: cuts and elements under spans, and walks over the queries that see keys.

A span is the keys from a begin up to an end; a query sees the keys in any of its spans. The cuts of a row of tiles are
then four per span, and the tiles of a later span follow those of an earlier one. Tiles of queries that visit a tile of
keys need not be neighbours: which do is found in a table of the cuts of all rows, CHUNK of them at a time, as bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.blocks import to_int64
from flashtile.backends.gpu.cuts import NEAR, clip, cuts, reach
from flashtile.backends.gpu.unspecialized import plain

CHUNK = tl.constexpr(64)  # rows of tiles whose visits are the bits of one integer
WIDE = tl.constexpr(1024)  # rows of tiles that are searched together for those of a walk


@triton.jit
def span_of(rule, n, sequence, o_h, o_i, real, offset, k_len):
    """Span n of each query, clipped to the band and to the keys in use: its begin and its end. 0, 0 if not real."""
    p = rule.spans + to_int64(sequence) * rule.spans_sequence + to_int64(o_h) * rule.spans_head
    p += to_int64(o_i) * rule.spans_row + 2 * n
    begin = tl.maximum(tl.load(p, mask=real, other=0), 0)
    end = tl.minimum(tl.load(p + 1, mask=real, other=0), k_len)
    if rule.left is not None:
        begin = tl.maximum(begin, o_i + offset - plain(rule.left))
    if rule.right is not None:
        end = tl.minimum(end, o_i + offset + plain(rule.right) + 1)
    return begin, end


@triton.jit
def in_spans(rule, tile):
    """Which pairs of a tile the spans, the band and the keys in use make visible."""
    visible = tile.o_j < 0
    for n in tl.static_range(rule.n_spans):
        begin, end = span_of(rule, n, tile.sequence, tile.o_h, tile.o_i, tile.real_i, tile.offset, tile.k_len)
        visible = visible | ((tile.o_j >= begin) & (tile.o_j < end))
    return visible


@triton.jit
def span_cuts(rule, at, o_h, o_i, real, BLOCK: tl.constexpr):
    """The cuts of the key tiles that these rows see: begin, full_begin, full_end and end of each span, in one tuple."""
    reduced = ()
    for n in tl.static_range(rule.n_spans - 1, -1, -1):
        begins, ends = span_of(rule, n, at.sequence, o_h, o_i, real, at.offset, at.k_len)
        counts = begins < ends
        ends = tl.where(counts, ends, 0)  # an end of 0 stands for a row that does not count
        first_begin = tl.min(tl.where(counts, begins, NEAR), 0)
        if len(reduced) > 0:  # some rows may lack this span and have a later one before it
            first_begin = tl.minimum(first_begin, reduced[0])
        last_begin = tl.max(tl.where(counts, begins, 0), 0)
        reduced = (first_begin, last_begin, tl.min(tl.where(real, ends, NEAR), 0), tl.max(ends, 0)) + reduced  # noqa: RUF005
    found = ()
    before = reduced[0] * 0
    for n in tl.static_range(0, len(reduced), 4):
        begin = tl.where(reduced[n + 3] > 0, tl.maximum(reduced[n] // BLOCK, before), before)
        end = tl.maximum(tl.cdiv(reduced[n + 3], BLOCK), begin)
        full_begin = clip(tl.cdiv(reduced[n + 1], BLOCK), begin, end)
        full_end = clip(reduced[n + 2] // BLOCK, full_begin, end)
        found = found + (begin, full_begin, full_end, end)  # noqa: RUF005
        before = end
    return found


@triton.jit
def cuts_of_rows(rule, at, head, first, PACKED_HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """The cuts of the key tiles that BLOCK_Q rows from `first` on see. PACKED_HEADS heads share them."""
    if rule.spans is not None:
        r = first + tl.arange(0, BLOCK_Q)
        o_h = head * PACKED_HEADS + r % PACKED_HEADS
        return span_cuts(rule, at, o_h, r // PACKED_HEADS, r < at.q_len * PACKED_HEADS, BLOCK_K)
    else:
        last = (tl.minimum(first + BLOCK_Q, at.q_len * PACKED_HEADS) - 1) // PACKED_HEADS + 1
        return cuts(reach(rule.left), reach(rule.right), at.offset, first // PACKED_HEADS, last, at.k_len, BLOCK_K)


@triton.jit
def row_cuts_of(row_cuts, at, h, BLOCK_Q: tl.constexpr):
    """A pointer to the first cut of the first row of tiles of a head. The next cut is row_cuts.row further on.

    Tiles of packed sequences are counted as locate() counts them; the sequence stride is 1 then.
    """
    p = row_cuts.ptr + to_int64(at.sequence) * row_cuts.sequence + to_int64(h) * row_cuts.head
    return p + at.q_start // BLOCK_Q


@triton.jit
def visits(p_cuts, stride, o_t, tiles, j, SPANS: tl.constexpr):
    """Which of the rows of tiles o_t visit tile j of the keys, and which of them as a full one."""
    there = o_t < tiles
    visited = o_t < 0
    full = visited
    for n in tl.static_range(SPANS):
        p = p_cuts + to_int64(4 * n) * stride + o_t
        begin = tl.load(p, mask=there, other=0)
        full_begin = tl.load(p + stride, mask=there, other=0)
        full_end = tl.load(p + 2 * stride, mask=there, other=0)
        end = tl.load(p + 3 * stride, mask=there, other=0)
        visited = visited | ((begin <= j) & (j < end))
        full = full | ((full_begin <= j) & (j < full_end))
    return visited, full


@triton.jit
def visitors(p_cuts, stride, tiles, j, SPANS: tl.constexpr):
    """The first row of tiles that visits tile j of the keys, and one past the last."""
    first = j * 0
    last = first + tiles
    if tiles > CHUNK:
        first, last = last, first
        for t in range(0, tiles, WIDE):
            o_t = t + tl.arange(0, WIDE)
            visited, _full = visits(p_cuts, stride, o_t, tiles, j, SPANS)
            first = tl.minimum(first, tl.min(tl.where(visited, o_t, tiles), 0))
            last = tl.maximum(last, tl.max(tl.where(visited, o_t + 1, 0), 0))
    return first, last


@triton.jit
def chunk_of_visits(p_cuts, stride, t, tiles, j, SPANS: tl.constexpr):
    """The visits of CHUNK rows of tiles from t on, by stretch (stretch_of()): the bits, and how many are set."""
    o_n = tl.arange(0, CHUNK)
    visited, full = visits(p_cuts, stride, t + o_n, tiles, j, SPANS)
    partial = visited & (full == 0)
    return bits_of(full, o_n) + bits_of(partial, o_n) + bits_of(visited, o_n)


@triton.jit
def bits_of(is_set, o_n):
    """One integer with bit n set for each n of o_n that is, and their number."""
    one = tl.full(is_set.shape, 1, tl.uint64)
    return tl.sum(tl.where(is_set, one << o_n.to(tl.uint64), one * 0), 0), tl.sum(is_set.to(tl.int32), 0)


@triton.jit
def next_visit(bits, t, place, CUT_Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The first query of visit number `place` of a chunk from row of tiles t on, and the bits that are left.

    A row of tiles of CUT_Q queries is as many visits as there are tiles of BLOCK_Q in it.
    """
    PARTS: tl.constexpr = CUT_Q // BLOCK_Q
    others = bits & (bits - 1)
    lowest = (bits ^ others).to(tl.float32)  # exact, a power of two
    n = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    left = tl.where(place % PARTS == PARTS - 1, others, bits)
    return (t + n) * CUT_Q + place % PARTS * BLOCK_Q, left
