"""The kernel that finishes dQ: from float32, in the order of threads, to the caller's dtype and rows."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.blocks import number, wide


@triton.jit(do_not_specialize=["n_rows", "tiles", "heads", "q_tiles"])
def finish_kernel(
    total,
    dq,
    marks,
    scale,
    n_rows,
    tiles,
    heads,
    q_tiles,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program makes 64 rows. The grid counts tiles of them, then heads, then sequences. q_tiles: with padding."""
    program = tl.program_id(0)
    tile = program % tiles
    column = program // tiles  # of heads, then sequences
    o_r = tile * 64 + tl.arange(0, 64)
    there = o_r < n_rows
    p_dq = dq.ptr + wide(column // heads) * dq.sequence + wide(column % heads) * dq.head + wide(o_r) * dq.row
    flaw = tl.zeros([64], tl.float32)
    for part in tl.static_range(BLOCK_D // 64):
        # bits of a place: column 0, row 3, columns 1 and 2, rows 0 to 2, rows 4 and 5, columns 3 to 5
        p = total + ((wide(column) * q_tiles + tile) * (BLOCK_D // 64) + part) * 4096
        x = tl.load(p + tl.arange(0, 4096)) * number(scale, tl.float32)
        x = tl.reshape(tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5]), [64, 64])
        o_d = part * 64 + tl.arange(0, 64)
        kept = there[:, None] & (o_d < DIM)[None, :]
        tl.store(p_dq[:, None] + o_d[None, :], x.to(dq.ptr.dtype.element_ty), mask=kept)
        flaw += tl.sum(x * 0.0, 1)
    tl.store(marks + program, tl.max(((flaw != 0) & there).to(tl.int32), 0))
