"""The merge kernel: combines the partial results of split keys (eq. 8)."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.scores import exp2_of, log_sum_exp


@triton.jit(do_not_specialize=["lse_split", "n_rows", "n_heads"])
def merge_kernel(
    part,
    part_lse,
    out,
    lse,
    part_split,
    lse_split,
    n_rows,
    n_heads,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merge one row per program.

    The SPLITS partials are float32 (float64). part_lse holds half of each m in base 2, then each l.
    """
    row = tl.program_id(0) % n_rows
    head = tl.program_id(0) // n_rows % n_heads
    sequence = (tl.program_id(0) // n_rows // n_heads).to(tl.int64)
    o_s = tl.arange(0, BLOCK_S)
    o_v = tl.arange(0, BLOCK_DV)
    p_lse = part_lse.ptr + sequence * part_lse.sequence + head * part_lse.head + row * part_lse.row
    m = tl.load(p_lse + o_s * lse_split, mask=o_s < SPLITS, other=float("-inf"))
    l = tl.load(p_lse + (SPLITS + o_s) * lse_split, mask=o_s < SPLITS, other=0.0)
    top = tl.max(m, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = l * exp2_of(m - top, True)
    total = tl.sum(weight, 0)
    weight /= tl.where(total == 0, 1.0, total)  # before the sum, which might overflow otherwise
    p_part = part.ptr + sequence * part.sequence + head * part.head + row * part.row
    there = (o_s < SPLITS)[:, None] & (o_v < DIM_V)[None, :]
    b_part = tl.load(p_part + o_s.to(tl.int64)[:, None] * part_split + o_v[None, :], mask=there, other=0.0)
    b_out = tl.sum(weight[:, None] * b_part, 0)
    p_out = out.ptr + sequence * out.sequence + head * out.head + row * out.row
    tl.store(p_out + o_v, b_out.to(out.ptr.dtype.element_ty), mask=o_v < DIM_V)
    p_lse_out = lse.ptr + sequence * lse.sequence + head * lse.head + row * lse.row
    tl.store(p_lse_out, tl.where(total == 0, float("-inf"), log_sum_exp(top, total)))
