"""Merging: partial results over shares of the keys -> the result (eq. 8), by the program that is done last."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.blocks import row_pointers, wide
from flashtile.backends.triton.scores import LN2


@triton.jit
def last_of(ticket, COUNT: tl.constexpr):
    """Whether COUNT - 1 programs were here before; what they stored is then to be seen. It leaves the 0 it found."""
    tl.debug_barrier()
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == COUNT - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def merge_rows(part, part_lse, out, lse, queries, at, part_split, lse_split, SPLITS: tl.constexpr, C: tl.constexpr):
    """Merge the rows of a tile. SPLITS partials come in as float32 (float64), with m in base 2 and, after those, l."""
    o_s = tl.arange(0, SPLITS)
    o_v = tl.arange(0, C.BLOCK_DV)
    p_m = row_pointers(part_lse, queries, at)
    p_l = p_m + wide(SPLITS) * lse_split
    p_m_all = p_m[:, None] + wide(o_s)[None, :] * lse_split
    m_all = tl.load(p_m_all, mask=queries.inside[:, None], other=float("-inf"), cache_modifier=".cg")
    top = tl.max(m_all, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    p_part = row_pointers(part, queries, at)[:, None] + o_v[None, :]
    there = queries.inside[:, None] & (o_v < C.DIM_V)[None, :]
    total = tl.zeros([C.BLOCK_Q], C.REAL)
    acc = tl.zeros([C.BLOCK_Q, C.BLOCK_DV], C.REAL)
    UNROLL: tl.constexpr = 8 if SPLITS > 8 else SPLITS  # so many loads are under way at a time
    for s in tl.range(0, SPLITS, loop_unroll_factor=UNROLL):
        m = tl.load(p_m + wide(s) * lse_split, mask=queries.inside, other=float("-inf"), cache_modifier=".cg")
        l = tl.load(p_l + wide(s) * lse_split, mask=queries.inside, other=0.0, cache_modifier=".cg")
        weight = l * tl.exp2(m - top)
        total += weight
        acc += weight[:, None] * tl.load(p_part + wide(s) * part_split, mask=there, other=0.0, cache_modifier=".cg")
    b_out = acc / tl.where(total == 0, 1.0, total)[:, None]
    p_out = row_pointers(out, queries, at)[:, None] + o_v[None, :]
    tl.store(p_out, b_out.to(out.ptr.dtype.element_ty), mask=there)
    b_lse = tl.where(total == 0, float("-inf"), top * LN2 + tl.log(total))
    tl.store(row_pointers(lse, queries, at), b_lse, mask=queries.inside)
