"""Products that a masked NaN cannot spoil.

0 * NaN is NaN, so one NaN in a value would reach every row of its tile, even rows that do not see it. Ordinary data
pays nothing for that: rows with finite sums are done. All others are recomputed by a careful walk, the same functions
with CAREFUL set: all tiles are masked, none is fetched by a descriptor, products take the finite part of the second
factor, and then poison() gives NaN and Inf to exactly the rows that see them. nonfinite_kernels.py does that for
flagged tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.gpu.blocks import to_int64
from flashtile.backends.gpu.scores import dot

# Minimum number of sources in a product. With a mask and dropout Triton 3.6 gives each thread 8 in a row, 32 to four
# threads together; of 16 sources it multiplies one half twice and the other half not at all.
MIN_SOURCES = tl.constexpr(32)
CHUNK = tl.constexpr(64)  # columns that poison() updates at a time: 8 for each of 8 warps, which must not share any


@triton.jit
def has_nonfinite(x):
    """Whether a block holds any NaN or Inf. keep_dims, because Triton 3.6 fails on sm_100 without it."""
    rows = tl.max(((x - x) != 0).to(tl.int32), 1, keep_dims=True)
    return tl.reshape(tl.max(rows, 0, keep_dims=True), []) > 0


@triton.jit
def at_least_float32(x):
    """x in float32, unless it is float64: the interpreter has no bfloat16 arithmetic."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def finite_part(x, CAREFUL: tl.constexpr):
    """x with NaN and Inf replaced by 0 on the careful walk; x itself otherwise."""
    if CAREFUL:
        wide_x = at_least_float32(x)
        x = tl.where((wide_x - wide_x) != 0, 0.0, wide_x).to(x.dtype)
    return x


@triton.jit
def poison(p_rows, in_target, source, first, visible, DIM: tl.constexpr, INF_IS_NAN: tl.constexpr, C: tl.constexpr):
    """Give each target row the NaN and Inf of the source rows that it sees: [t] pointers to rows, [t, s] visible.

    INF_IS_NAN: Inf counts as NaN. The source is a query or a key, where an Inf makes a score of -Inf at best, or its
    weights were dropped; 0 * Inf is NaN.
    One product counts what a row sees in each column: NaN by ones, Inf by 2^8, -Inf by 2^16, exact in bfloat16.
    """
    ROWS: tl.constexpr = visible.shape[0]
    o_s = tl.arange(0, visible.shape[1])
    if visible.shape[1] < MIN_SOURCES:  # pad: an invisible source beside each one
        visible = tl.reshape(tl.join(visible, visible & False), [ROWS, 2 * visible.shape[1]])
        o_s = tl.arange(0, visible.shape[1]) // 2
    in_source = first + o_s < source.length
    for c in range(0, DIM, CHUNK):
        o_d = c + tl.arange(0, CHUNK)
        p_block = source.ptr + to_int64(first) * source.row + o_s[:, None] * source.row + o_d[None, :]
        B = at_least_float32(tl.load(p_block, mask=in_source[:, None] & (o_d < DIM)[None, :], other=0.0))
        if INF_IS_NAN:
            code = tl.where((B - B) != 0, 1.0, 0.0)
        else:
            code = tl.where(B != B, 1.0, tl.where(float("inf") == B, 256.0, tl.where(float("-inf") == B, 65536.0, 0.0)))
        count = tl.zeros([ROWS, CHUNK], tl.float32)
        EXACT: tl.constexpr = tl.float32 if C.PRECISION == "widened" else tl.bfloat16
        count = dot(visible.to(EXACT), code.to(EXACT), count, C.PRECISION).to(tl.int32)
        p = p_rows[:, None] + o_d[None, :]
        there = in_target[:, None] & (o_d < DIM)[None, :]
        x = tl.load(p, mask=there, other=0.0).to(C.REAL)
        x = tl.where(((count >> 8) & 255) > 0, x + float("inf"), x)
        x = tl.where((count >> 16) > 0, x - float("inf"), x)
        x = tl.where((count & 255) > 0, float("nan"), x)
        tl.store(p, x.to(p_rows.dtype.element_ty), mask=there)
    tl.debug_barrier()
