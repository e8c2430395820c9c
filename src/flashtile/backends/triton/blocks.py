"""Where a program's rows lie, and blocks of rows in and out of memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def number(bits, REAL: tl.constexpr):
    """A number that came as the bits of a double."""
    return tl.cast(tl.cast(bits, tl.int64), tl.float64, bitcast=True).to(REAL)


@triton.jit
def wide(x):
    return tl.cast(x, tl.int64)


@triton.jit
def base(x, sequence, head, start):
    """Pointer to a sequence's first row of a head. `head` may be a block."""
    return x.ptr + wide(sequence) * x.sequence + wide(head) * x.head + wide(start) * x.row


@triton.jit
def load_block(
    x,
    desc,
    sequence,
    head,
    first,
    inside,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """[ROWS, BLOCK] from row `first` of a head on: 0 beyond DIM and, where RAGGED, outside.

    With a descriptor the copy engine fetches it; it may then hold a neighbour's rows where a packed sequence ends.
    """
    if desc is not None:
        return tl.reshape(desc.load([sequence * (x.sequence != 0), head, first, 0]), [ROWS, BLOCK])
    else:
        o_r = tl.arange(0, ROWS)
        o_d = tl.arange(0, BLOCK)
        p = base(x, sequence, head, first) + o_r[:, None] * x.row + o_d[None, :]
        if RAGGED:
            return tl.load(p, mask=inside[:, None] & (o_d < DIM)[None, :], other=0.0)
        elif DIM != BLOCK:
            return tl.load(p, mask=(o_d < DIM)[None, :], other=0.0)
        else:
            return tl.load(p)


@triton.jit
def store_block(p, row, first, o_r, o_d, inside, DIM: tl.constexpr, x):
    p_block = p + wide(first) * row + o_r[:, None] * row + o_d[None, :]
    tl.store(p_block, x.to(p.dtype.element_ty), mask=inside[:, None] & (o_d < DIM)[None, :])


@triton.jit
def find_sequence(p_cu, tile, sequences, BLOCK: tl.constexpr):
    """The packed sequence that owns a tile. Sequence s has the tiles from cu[s] // BLOCK + s on."""
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        starts = tl.load(p_cu + middle).to(tl.int32) // BLOCK + middle
        low = tl.where(starts <= tile, middle, low)
        high = tl.where(starts <= tile, high, middle - 1)
    return low


@triton.jit
def locate(p_cu, tile, sequence, sequences, BLOCK: tl.constexpr):
    """The sequence of a program and its tile there. In a packed layout the grid only counts tiles."""
    if p_cu is not None:
        sequence = find_sequence(p_cu, tile, sequences, BLOCK)
        tile -= tl.load(p_cu + sequence).to(tl.int32) // BLOCK + sequence
    return sequence, tile


@triton.jit
def extent(p_cu, sequence, n):
    """First row and number of rows of a sequence: read from a packed layout, or 0 and n."""
    if p_cu is None:
        return 0, n
    else:
        start = tl.load(p_cu + sequence).to(tl.int32)
        return start, tl.load(p_cu + sequence + 1).to(tl.int32) - start


@triton.jit
def measure(lengths, offset, sequence):
    """q_start, q_len, k_start, room for keys, keys in use, and the band's offset in a sequence."""
    q_start, q_len = extent(lengths.cu_q, sequence, lengths.n_q)
    k_start, k_room = extent(lengths.cu_k, sequence, lengths.n_k)
    k_len = k_room
    if lengths.kv is not None:
        k_len = tl.load(lengths.kv + sequence).to(tl.int32)
    if offset is None:
        return q_start, q_len, k_start, k_room, k_len, k_len - q_len
    else:
        return q_start, q_len, k_start, k_room, k_len, offset
