"""The kernel of merge(): results over disjoint keys, each in tensors of its own, into one (eq. 8)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offsets(strides, ARRAY: tl.constexpr, i_0, i_1, i_2):
    """Where rows begin in an array, whose three strides are in a flat tuple of those of all arrays."""
    return i_0 * strides[3 * ARRAY] + i_1 * strides[3 * ARRAY + 1] + i_2 * strides[3 * ARRAY + 2]


@triton.jit
def load_lse(arrays, strides, ARRAY: tl.constexpr, i_0, i_1, i_2, there, REAL: tl.constexpr):
    p = arrays[ARRAY] + row_offsets(strides, ARRAY, i_0, i_1, i_2)
    return tl.load(p, mask=there, other=float("-inf")).to(REAL)


@triton.jit
def merge_results_kernel(
    arrays,
    strides,
    rows,
    n_1,
    n_2,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REAL: tl.constexpr,
):
    """Merge a block of rows, which lie along three axes; n_1 and n_2 are the lengths of the last two.

    arrays holds out and lse of each result, then those of the merged one, which may be among them: so a barrier stands
    between loads and stores.
    """
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = r < rows
    i_0, i_1, i_2 = r // n_2 // n_1, r // n_2 % n_1, r % n_2
    top = tl.full([BLOCK_R], float("-inf"), REAL)
    for n in tl.static_range(COUNT):
        lse = load_lse(arrays, strides, 2 * n + 1, i_0, i_1, i_2, there, REAL)
        top = tl.maximum(top, lse, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_R], REAL)
    for n in tl.static_range(COUNT):
        total += tl.exp(load_lse(arrays, strides, 2 * n + 1, i_0, i_1, i_2, there, REAL) - base)
    divisor = tl.where(total == 0, 1.0, total)
    for first in tl.static_range(0, WIDTH, BLOCK_D):
        o_d = first + tl.arange(0, BLOCK_D)
        mask = there[:, None] & (o_d < WIDTH)[None, :]
        out = tl.zeros([BLOCK_R, BLOCK_D], REAL)
        for n in tl.static_range(COUNT):
            lse = load_lse(arrays, strides, 2 * n + 1, i_0, i_1, i_2, there, REAL)
            p = arrays[2 * n] + row_offsets(strides, 2 * n, i_0, i_1, i_2)[:, None] + o_d[None, :]
            x = tl.load(p, mask=mask, other=0.0).to(REAL)
            out += tl.where((lse == float("-inf"))[:, None], 0.0, (tl.exp(lse - base) / divisor)[:, None] * x)
        p = arrays[2 * COUNT] + row_offsets(strides, 2 * COUNT, i_0, i_1, i_2)[:, None] + o_d[None, :]
        tl.debug_barrier()
        tl.store(p, out.to(arrays[2 * COUNT].dtype.element_ty), mask=mask)
    tl.debug_barrier()
    p = arrays[2 * COUNT + 1] + row_offsets(strides, 2 * COUNT + 1, i_0, i_1, i_2)
    lse = tl.where(total == 0, float("-inf"), base + tl.log(total))
    tl.store(p, lse.to(arrays[2 * COUNT + 1].dtype.element_ty), mask=there)
