"""The kernel that finishes dQ: from float32, in the order of threads, to the caller's dtype and rows."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.blocks import extent, locate, number, wide
from flashtile.backends.triton.steady import plain


@triton.jit(do_not_specialize=["tiles", "heads", "q_tiles", "mark_tiles"])
def finish_kernel(
    total,
    dq,
    marks,
    scale,
    lengths,
    tiles,
    heads,
    q_tiles,
    mark_tiles,
    BLOCK_Q: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program makes 64 rows. The grid counts tiles of them, then heads, then sequences."""
    program = tl.program_id(0)
    head = program // tiles % heads
    sequence, tile = locate(lengths.cu_q, lengths.n_q, program % tiles, program // tiles // heads, lengths, 64)
    q_start, q_len = extent(lengths.cu_q, sequence, plain(lengths.n_q))
    if tile * 64 < q_len:
        mark = tile
        at = tile
        if lengths.cu_q is not None:
            mark += q_start // 64 + sequence
            at += (q_start // BLOCK_Q + sequence) * (BLOCK_Q // 64)
            sequence = 0
        column = sequence * heads + head
        o_r = tl.arange(0, 64)
        rows = q_start + tile * 64 + o_r
        there = tile * 64 + o_r < q_len
        p_dq = dq.ptr + wide(sequence) * dq.sequence + wide(head) * dq.head + wide(rows) * dq.row
        flaw = tl.zeros([64], tl.float32)
        for part in tl.static_range(BLOCK_D // 64):
            # bits of a place: column 0, row 3, columns 1 and 2, rows 0 to 2, rows 4 and 5, columns 3 to 5
            p = total + (wide(column) * q_tiles + at) * (BLOCK_D // 64) * 4096 + part * 4096
            x = tl.load(p + tl.arange(0, 4096)) * number(scale, tl.float32)
            x = tl.reshape(tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5]), [64, 64])
            o_d = part * 64 + tl.arange(0, 64)
            tl.store(
                p_dq[:, None] + o_d[None, :], x.to(dq.ptr.dtype.element_ty), mask=there[:, None] & (o_d < DIM)[None, :]
            )
            flaw += tl.sum(x * 0.0, 1)
        tl.store(marks + column * mark_tiles + mark, tl.max(((flaw != 0) & there).to(tl.int32), 0))
