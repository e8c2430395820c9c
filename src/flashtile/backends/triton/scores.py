"""What happens to a tile of scores between q.k and softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.backends.triton.blocks import number, wide

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """Accurate also near 0, where 1 - exp(-2|x|) cancels."""
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    z = x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    near = x + x * z * near
    if x.dtype == tl.float64:
        near = tl.where(x < 0, -far, far)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def pair_pointers(p, sequence_stride, head_stride, row_stride, column_stride, sequence, o_h, o_i, o_j):
    """Pointers into a mask or bias. o_i and o_j broadcast, either way round; o_h is a scalar or goes with o_i."""
    p += wide(sequence) * sequence_stride + wide(o_h) * head_stride
    return p + wide(o_i) * row_stride + wide(o_j) * column_stride


@triton.jit
def shape_scores(S, rule, o_i, o_j, o_h, inside, sequence, offset, MASKED: tl.constexpr):
    """softcap, + bias, + alibi, mask, of q.k (S). Returns S, its unit, softcap's slope, and what is visible.

    S * unit is the score in base 2: where nothing bends or shifts the scores, scaling waits until exp2, as an FMA.
    o_i, o_j: query and key positions, [r, 1] and [1, c] or the other way round. `inside`: real queries and keys.
    """
    scale = number(rule.scale, S.dtype)
    slope = S
    unit = scale * LOG2E
    if rule.softcap is not None:
        cap = number(rule.softcap, S.dtype)
        bent = tanh(S * (scale / cap))
        slope = 1 - bent * bent
        S = bent * cap
        unit = unit * 0 + LOG2E
    elif rule.bias is not None or rule.alibi is not None or rule.scale_first is not None:
        S = S * scale
        unit = unit * 0 + LOG2E
    if rule.bias is not None:
        p_bias = pair_pointers(
            rule.bias, rule.bias_sequence, rule.bias_head, rule.bias_row, rule.bias_column, sequence, o_h, o_i, o_j
        )
        S += tl.load(p_bias, mask=inside, other=0.0).to(S.dtype)
    if rule.alibi is not None:
        weight = tl.load(rule.alibi + sequence * rule.alibi_sequence + o_h * rule.alibi_head).to(S.dtype)
        S -= weight * tl.abs(o_i + offset - o_j).to(S.dtype)
    return S, unit, slope, visible_pairs(rule, o_i, o_j, o_h, inside, sequence, offset, MASKED)


@triton.jit
def visible_pairs(rule, o_i, o_j, o_h, inside, sequence, offset, MASKED: tl.constexpr):
    """Which queries may see which keys. MASKED: the band may cut this tile."""
    visible = inside
    if MASKED:
        distance = o_j - o_i - offset
        visible = visible & (distance >= -rule.left) & (distance <= rule.right)
    if rule.mask is not None:
        p_mask = pair_pointers(
            rule.mask, rule.mask_sequence, rule.mask_head, rule.mask_row, rule.mask_column, sequence, o_h, o_i, o_j
        )
        visible = visible & (tl.load(p_mask, mask=inside, other=0) != 0)
    return visible


@triton.jit
def kept(rule, sequence, o_h, o_i, j0, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """Which weights of a tile [BLOCK_I, BLOCK_J] dropout keeps, the twin of dropout.py; j0 is a multiple of 4."""
    quads = (j0 // 4 + tl.arange(0, BLOCK_J // 4))[None, :]
    c0 = tl.broadcast_to(quads, (BLOCK_I, BLOCK_J // 4))
    c1 = tl.broadcast_to(o_i, (BLOCK_I, BLOCK_J // 4))
    c2 = tl.broadcast_to(sequence * rule.heads + o_h, (BLOCK_I, BLOCK_J // 4))
    r0, r1, r2, r3 = tl.philox(rule.seed, c0, c1, c2, c0 * 0)
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (BLOCK_I, BLOCK_J))
    return bits >= tl.cast(rule.threshold, tl.uint32)


@triton.jit
def dot(A, B, acc, PRECISION: tl.constexpr):
    """acc + A B. The interpreter multiplies bfloat16 wrongly: it asks for PRECISION "wide", which widens first."""
    if PRECISION == "wide":
        return tl.dot(A.to(acc.dtype), B.to(acc.dtype), acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        return tl.dot(A, B, acc, input_precision=PRECISION, out_dtype=acc.dtype)
