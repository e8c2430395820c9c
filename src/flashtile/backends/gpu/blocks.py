"""Where a program's rows are, and loads and stores of blocks of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.cuts import clip
from flashtile.backends.gpu.unspecialized import plain


class SequenceBounds(NamedTuple):
    """One sequence: its first rows, their numbers, the number of keys in use, and the band's offset."""

    sequence: Any
    q_start: Any
    q_len: Any
    k_start: Any
    k_rows: Any
    k_len: Any
    offset: Any


class Head(NamedTuple):
    """One head of one sequence: a pointer to its first row, the row stride, and its coordinates for a descriptor."""

    ptr: Any
    row: Any
    length: Any
    sequence: Any
    head: Any
    start: Any


@triton.jit
def from_bits(bits, REAL: tl.constexpr):
    """Decode a number passed as the bits of a double."""
    return tl.cast(tl.cast(bits, tl.int64), tl.float64, bitcast=True).to(REAL)


@triton.jit
def to_int64(x):
    return tl.cast(x, tl.int64)


@triton.jit
def head_of(x, sequence, head, start, length):
    """Rows start .. start + length of a head of x."""
    ptr = x.ptr + to_int64(sequence) * x.sequence + to_int64(head) * x.head + to_int64(start) * x.row
    return Head(ptr, x.row, length, sequence * (x.sequence != 0), head, start)


@triton.jit
def widen_8_bits(block):
    """Widen 8-bit numbers to bfloat16, which is exact; other types pass through."""
    return block.to(tl.bfloat16) if block.dtype == tl.float8e4nv else block


@triton.jit
def load_rows(x, desc, first, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr):
    """Load [ROWS, BLOCK] from row `first` of a head on: 0 beyond DIM and, if RAGGED, beyond the last row.

    With a descriptor the copy engine fetches the block, which may hold the next sequence's rows after a packed one.
    """
    if desc is not None:
        return tl.reshape(desc.load([x.sequence, x.head, x.start + first, 0]), [ROWS, BLOCK])
    else:
        o_r = tl.arange(0, ROWS)
        o_d = tl.arange(0, BLOCK)
        p = x.ptr + to_int64(first) * x.row + o_r[:, None] * x.row + o_d[None, :]
        if RAGGED:
            return tl.load(p, mask=(first + o_r < x.length)[:, None] & (o_d < DIM)[None, :], other=0.0)
        elif DIM != BLOCK:
            return tl.load(p, mask=(o_d < DIM)[None, :], other=0.0)
        else:
            return tl.load(p)


@triton.jit
def store_rows(x, first, block, DIM: tl.constexpr):
    """Store the columns up to DIM of a block, as far as the head has rows."""
    o_r = tl.arange(0, block.shape[0])
    o_d = tl.arange(0, block.shape[1])
    p = x.ptr + to_int64(first) * x.row + o_r[:, None] * x.row + o_d[None, :]
    there = (first + o_r < x.length)[:, None] & (o_d < DIM)[None, :]
    tl.store(p, block.to(x.ptr.dtype.element_ty), mask=there)


@triton.jit
def load_per_row(x, first, ROWS: tl.constexpr, other, RAGGED: tl.constexpr):
    """Load one number per row, such as the lse: [ROWS]. If RAGGED, `other` beyond the last row."""
    o_r = tl.arange(0, ROWS)
    p = x.ptr + to_int64(first) * x.row + o_r * x.row
    if RAGGED:
        return tl.load(p, mask=first + o_r < x.length, other=other)
    else:
        return tl.load(p)


@triton.jit
def store_per_row(x, first, values):
    """Store one number per row, as far as the head has rows."""
    o_r = tl.arange(0, values.shape[0])
    tl.store(x.ptr + to_int64(first) * x.row + o_r * x.row, values, mask=first + o_r < x.length)


@triton.jit
def start_of(p_cu, sequence, total):
    """The first row of a packed sequence, clipped to the rows that exist."""
    return clip(tl.load(p_cu + sequence).to(tl.int32), 0, total)


@triton.jit
def find_sequence(p_cu, tile, sequences, total, BLOCK: tl.constexpr):
    """The packed sequence that a tile belongs to. Sequence s has the tiles from cu[s] // BLOCK + s on."""
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        starts = start_of(p_cu, middle, total) // BLOCK + middle
        low = tl.where(starts <= tile, middle, low)
        high = tl.where(starts <= tile, high, middle - 1)
    return low


@triton.jit
def locate(p_cu, total, tile, sequence, lengths, BLOCK: tl.constexpr):
    """The sequence of a program, and its tile in that sequence. In a packed layout the grid counts only tiles."""
    if p_cu is not None:
        sequence = find_sequence(p_cu, tile, plain(lengths.sequences), plain(total), BLOCK)
        tile = tl.maximum(tile - start_of(p_cu, sequence, plain(total)) // BLOCK - sequence, 0)
    return sequence, tile


@triton.jit
def extent(p_cu, sequence, n):
    """The first row and the number of rows of a sequence: from cu_seqlens if packed, else 0 and n."""
    if p_cu is None:
        return 0, n
    else:
        start = start_of(p_cu, sequence, n)
        return start, tl.maximum(start_of(p_cu, sequence + 1, n) - start, 0)


@triton.jit
def sequence_bounds(lengths, offset, sequence):
    """The SequenceBounds of a sequence. An offset of None aligns its last query with its last key."""
    q_start, q_len = extent(lengths.cu_q, sequence, plain(lengths.n_q))
    k_start, k_rows = extent(lengths.cu_k, sequence, plain(lengths.n_k))
    k_len = k_rows
    if lengths.kv is not None:
        k_len = tl.minimum(tl.maximum(tl.load(lengths.kv + sequence).to(tl.int32), 0), k_rows)
    if offset is None:
        return SequenceBounds(sequence, q_start, q_len, k_start, k_rows, k_len, k_len - q_len)
    else:
        return SequenceBounds(sequence, q_start, q_len, k_start, k_rows, k_len, offset)


@triton.jit
def tile_of(n, tiles, heads, p_cu, total, rule, lengths, BLOCK: tl.constexpr):
    """The n-th tile of all heads and sequences: its head, its number in its sequence, and that sequence's bounds.

    Tiles are of queries or of keys, depending on p_cu and total.
    """
    head = n // tiles % heads
    sequence, tile = locate(p_cu, total, n % tiles, n // tiles // heads, lengths, BLOCK)
    return head, tile, sequence_bounds(lengths, rule.offset, sequence)
