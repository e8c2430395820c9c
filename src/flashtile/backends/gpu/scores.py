"""A tile of scores between q.k and softmax: softcap, bias, ALiBi, masks and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.backends.gpu.blocks import from_bits, to_int64
from flashtile.backends.gpu.spans import in_spans
from flashtile.backends.gpu.unspecialized import half_of_seed, plain

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """Coordinates of a tile of scores. Positions and o_h broadcast, [r, 1] and [1, c] or the other way round."""

    o_i: Any
    o_j: Any
    o_h: Any
    real_i: Any  # whether the query exists
    k_len: Any
    sequence: Any
    offset: Any


@triton.jit
def least(REAL: tl.constexpr):
    """The lowest finite number of this type."""
    return -1.7976931348623157e308 if tl.float64 == REAL else -3.4028234663852886e38


@triton.jit
def exp2_of(x, HALVES: tl.constexpr):
    """2^x, or 2^2x if HALVES: with half the exponent no finite score overflows, not even a bias of finfo.min."""
    return tl.exp2(x + x) if HALVES else tl.exp2(x)


@triton.jit
def log_sum_exp(m, l):
    """The lse from a sum and half its maximum in base 2. Infinite only if m is."""
    L = m * (2 * LN2) + tl.log(l)
    L = tl.where((float("-inf") == L) & (m > float("-inf")) & (l > 0), least(m.dtype), L)
    return tl.where((float("inf") == L) & (m < float("inf")), -least(m.dtype), L)


@triton.jit
def inside(tile):
    """Pairs of a query that exists and a key in use."""
    return tile.real_i & (tile.o_j < tile.k_len)


@triton.jit
def tanh(x):
    """tanh(x), accurate near 0 too, where 1 - exp(-2|x|) cancels."""
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
    """Pointers into a mask, a bias or its gradient."""
    p += to_int64(sequence) * sequence_stride + to_int64(o_h) * head_stride
    return p + to_int64(o_i) * row_stride + to_int64(o_j) * column_stride


@triton.jit
def shape_scores(S, rule, tile):
    """Apply softcap, bias and ALiBi to q.k (S). Return S, its unit, and softcap's slope.

    S * unit is the score in base 2: if nothing bends or shifts the scores, scaling waits until exp2, as an FMA.
    """
    scale = from_bits(rule.scale, S.dtype)
    slope = S
    unit = scale * LOG2E
    if rule.softcap is not None:
        cap = from_bits(rule.softcap, S.dtype)
        bent = tanh(S * (scale / cap))
        slope = 1 - bent * bent
        S = bent * cap
        unit = unit * 0 + LOG2E
    elif rule.bias is not None or rule.alibi is not None or rule.scale_first is not None:
        S = S * scale
        unit = unit * 0 + LOG2E
    if rule.bias is not None:
        p_bias = pair_pointers(
            rule.bias,
            rule.bias_sequence,
            rule.bias_head,
            rule.bias_row,
            rule.bias_column,
            tile.sequence,
            tile.o_h,
            tile.o_i,
            tile.o_j,
        )
        S += tl.load(p_bias, mask=inside(tile), other=0.0).to(S.dtype)
    if rule.alibi is not None:
        weight = tl.load(rule.alibi + tile.sequence * rule.alibi_sequence + tile.o_h * rule.alibi_head).to(S.dtype)
        S -= weight * tl.abs(tile.o_i + tile.offset + plain(rule.alibi_offset) - tile.o_j).to(S.dtype)
    return S, unit, slope


@triton.jit
def visible_pairs(rule, tile, MASKED: tl.constexpr):
    """Which queries see which keys. MASKED: the band, a span or an end of the rows may cut this tile.

    A query sees the keys up to one index and, with a limit on the left, from another one on: two comparisons, and with
    spans two for each.
    """
    visible = inside(tile)
    if MASKED and rule.spans is not None:
        visible = in_spans(rule, tile)
    elif MASKED:
        at = tile.o_i + tile.offset
        if rule.right is not None:
            visible = tile.o_j <= tl.where(tile.real_i, tl.minimum(at + plain(rule.right), tile.k_len - 1), -1)
        else:
            visible = tile.o_j < tl.where(tile.real_i, tile.k_len, 0)
        if rule.left is not None:
            visible = visible & (tile.o_j >= at - plain(rule.left))
    if rule.mask is not None:
        p_mask = pair_pointers(
            rule.mask,
            rule.mask_sequence,
            rule.mask_head,
            rule.mask_row,
            rule.mask_column,
            tile.sequence,
            tile.o_h,
            tile.o_i,
            tile.o_j,
        )
        visible = visible & (tl.load(p_mask, mask=inside(tile), other=0) != 0)
    return visible


@triton.jit
def random_words(rule, sequence, o_h, o_i, blocks, BLOCK_I: tl.constexpr, COUNT: tl.constexpr):
    """Philox of these blocks of four keys, [1, COUNT], for each query: four words of [BLOCK_I, COUNT]."""
    c0 = tl.broadcast_to(blocks, (BLOCK_I, COUNT))
    if rule.origin_query is not None:
        o_i = plain(rule.origin_query) + o_i * plain(rule.query_step)
    c1 = tl.broadcast_to(o_i, (BLOCK_I, COUNT))
    head = sequence * plain(rule.heads) + o_h
    if rule.origin_head is not None:
        head += plain(rule.origin_head)
    c2 = tl.broadcast_to(head, (BLOCK_I, COUNT))
    if rule.seed_high is None:
        seed = tl.load(rule.seed_low).to(tl.uint64)
    else:
        seed = half_of_seed(rule.seed_high) << 32 | half_of_seed(rule.seed_low)
    return tl.philox(seed, c0, c1, c2, c0 * 0)


@triton.jit
def kept(rule, sequence, o_h, o_i, j0, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """Which weights of a tile [BLOCK_I, BLOCK_J] dropout keeps, as in dropout.py; j0 is a multiple of 4.

    The caller multiplies the others by 0, so that a NaN stays a NaN. Keys that are not in fours, because the origin
    says so, take a block each and use one word of it.
    """
    if rule.key_step is not None:
        o_j = plain(rule.origin_key) + (j0 + tl.arange(0, BLOCK_J))[None, :] * plain(rule.key_step)
        r0, r1, r2, r3 = random_words(rule, sequence, o_h, o_i, o_j // 4, BLOCK_I, BLOCK_J)
        bits = tl.where(o_j % 4 < 2, tl.where(o_j % 2 == 0, r0, r1), tl.where(o_j % 2 == 0, r2, r3))
    else:
        quads = (j0 // 4 + tl.arange(0, BLOCK_J // 4))[None, :]
        if rule.origin_key is not None:
            quads += plain(rule.origin_key) // 4
        r0, r1, r2, r3 = random_words(rule, sequence, o_h, o_i, quads, BLOCK_I, BLOCK_J // 4)
        bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (BLOCK_I, BLOCK_J))
    return bits >= tl.cast(rule.threshold, tl.uint32)


@triton.jit
def dot(A, B, acc, PRECISION: tl.constexpr):
    """acc + A B. PRECISION "widened" widens A and B first: the interpreter multiplies bfloat16 incorrectly."""
    if PRECISION == "widened":
        return tl.dot(A.to(acc.dtype), B.to(acc.dtype), acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        return tl.dot(A, B, acc, input_precision=PRECISION, out_dtype=acc.dtype)
