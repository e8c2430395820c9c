"""Kernels around the backward kernel on Hopper: row statistics and a cleared dQ before, dQ in its dtype after.

In between, rows have a padded layout: each head, or each packed sequence, is padded to whole tiles of keys. Packed
sequence s has the rows from (cu[s] // PAD + s) * PAD on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.backward_rows import row_statistics
from flashtile.backends.gpu.blocks import extent, from_bits, head_of, locate, store_per_row, to_int64
from flashtile.backends.gpu.pdl import await_count, launch_dependents, wait_for_previous
from flashtile.backends.gpu.unspecialized import plain

ZEROS = tl.constexpr(4096)  # a 64 x 64 tile of dQ


@triton.jit
def padded_tile(lengths, tile, sequence, ROWS: tl.constexpr, PAD: tl.constexpr):
    """The sequence of a tile of ROWS rows, its start and length, the tile's number in it, and its padded row."""
    sequence, tile = locate(lengths.cu_q, lengths.n_q, tile, sequence, lengths, ROWS)
    start, length = extent(lengths.cu_q, sequence, plain(lengths.n_q))
    row = tile * ROWS
    if lengths.cu_q is not None:
        row += (start // PAD + sequence) * PAD
    return sequence, start, length, tile, row


@triton.jit(do_not_specialize=["tiles", "heads", "padded", "all_heads"])
def begin_kernel(
    dout,
    out,
    lse,
    dlse,
    rows,
    log2,
    delta,
    tops,
    total,
    turns,
    complete,
    lengths,
    tiles,
    heads,
    padded,
    all_heads,
    GROUP: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAD: tl.constexpr,
    LARGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute lse in base 2 and delta of PAD rows per program, +inf and 0 beyond the last row; clear dQ and counters.

    The grid counts tiles, then heads, then sequences. all_heads: heads of all sequences. For the kernels after the
    pass, both statistics and a top of 0 are stored without padding too.
    """
    launch_dependents(PDL)
    program = tl.program_id(0)
    head = program // tiles % heads
    sequence = program // tiles // heads
    flat_head = sequence * heads + head
    sequence, start, length, tile, row = padded_tile(lengths, program % tiles, sequence, PAD, PAD)
    if lengths.cu_q is not None:
        flat_head = head
    if tile * PAD < length:
        first = tile * PAD
        L, D = row_statistics(dout, out, lse, dlse, sequence, head, start, length, first, DIM_V, BLOCK_DV, PAD, LARGE)
        o_r = tl.arange(0, PAD)
        at = to_int64(flat_head) * padded + row
        tl.store(rows + at + o_r, tl.where(first + o_r < length, L, float("inf")))
        tl.store(rows + to_int64(all_heads) * padded + at + o_r, D)
        store_per_row(head_of(log2, sequence, head, start, length), first, L)
        store_per_row(head_of(delta, sequence, head, start, length), first, D)
        store_per_row(head_of(tops, sequence, head, start, length), first, tl.zeros([PAD], L.dtype))
        squares: tl.constexpr = PAD * BLOCK_D // ZEROS
        for n in tl.static_range(squares):
            tl.store(total + at * BLOCK_D + n * ZEROS + tl.arange(0, ZEROS), tl.zeros([ZEROS], tl.float32))
        if turns is not None:
            tl.store(turns + at * BLOCK_D // ZEROS + tl.arange(0, squares), tl.zeros([squares], tl.int32))
        if complete is not None:
            tl.store(complete + flat_head // GROUP, 0)


@triton.jit(do_not_specialize=["tiles", "heads", "padded", "all_heads", "waiting_heads", "count"])
def finish_kernel(
    total,
    dq,
    flags,
    complete,
    scale,
    lengths,
    tiles,
    heads,
    padded,
    all_heads,
    waiting_heads,
    count,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convert dQ from float32, in the order of threads, to the caller's dtype and layout; 64 rows per program.

    The grid and the flags count tiles, then heads, then sequences. complete: for each key head, how many of `count`
    warps have added all of their tiles. The backward kernel takes the last head first, and so does this kernel in its
    tail. The first heads, waiting_heads, wait for all of it, because the memory of their results may hold its inputs.
    """
    launch_dependents(PDL)
    program = tl.program_id(0)
    if complete is not None:
        program = (all_heads - 1 - program // tiles) * tiles + program % tiles
    flat_head = program // tiles
    if flat_head < waiting_heads:
        wait_for_previous(PDL)
    elif complete is not None:
        await_count(complete + flat_head // GROUP, count, 500)
    head = flat_head % heads
    sequence = flat_head // heads
    sequence, start, length, tile, row = padded_tile(lengths, program % tiles, sequence, 64, PAD)
    if lengths.cu_q is not None:
        flat_head = head
    o_r = tile * 64 + tl.arange(0, 64)
    there = o_r < length
    x_dq = head_of(dq, sequence, head, start, length)
    p_dq = x_dq.ptr + to_int64(o_r) * x_dq.row
    flaw = tl.zeros([64], tl.float32)
    for part in tl.static_range(BLOCK_D // 64):
        # bits of an index: column 0, row 3, columns 1 and 2, rows 0 to 2, rows 4 and 5, columns 3 to 5
        p = total + (to_int64(flat_head) * padded + row) * BLOCK_D + part * 4096
        x = tl.load(p + tl.arange(0, 4096), mask=tile * 64 < length, other=0.0) * from_bits(scale, tl.float32)
        x = tl.reshape(tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5]), [64, 64])
        o_d = part * 64 + tl.arange(0, 64)
        kept = there[:, None] & (o_d < DIM)[None, :]
        tl.store(p_dq[:, None] + o_d[None, :], x.to(dq.ptr.dtype.element_ty), mask=kept)
        flaw += tl.sum(x * 0.0, 1)
    tl.store(flags + program, tl.max(((flaw != 0) & there).to(tl.int32), 0))
