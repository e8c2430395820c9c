"""The online softmax: a tile of scores in registers to weights, with running maximum and sum of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon.ptx import follow_growth, pack_halves, pack_quarters, reciprocal, scale_unless_one
from flashtile.backends.gpu.blocks import from_bits
from flashtile.backends.gpu.scores import LOG2E

NO_SCORES = gl.constexpr(-1e30)  # the maximum of no scores: finite, so that it can be taken off -inf
SLACK = gl.constexpr(8.0)  # the maximum is not updated if it has grown by less than this, in base 2
# For e4m3, which ends at 448 and keeps its 3 bits down to 2^-6: weights begin at 2^LIFT_8 and stay under 2^8.
LIFT_8 = gl.constexpr(6.0)
SLACK_8 = gl.constexpr(2.0)
FLAT_8 = gl.constexpr(1024.0)  # SLACK_8 applies to rows with a larger sum: no weight exceeds a quarter of it
GROWTH = gl.constexpr(14)  # a partial sum of a tile's weights over 2^GROWTH makes the maximum follow


class VisibleRange(NamedTuple):
    """The range of keys that each query sees, or in the backward pass of queries that see each key.

    last, first: for each query its keys, or in the backward pass for each key its queries.
    at, slope: the position from which alibi counts, and its slope.
    gain: the descaling factor of q.k, if the rule has one.
    """

    last: Any
    first: Any
    at: Any
    slope: Any
    gain: Any


@gluon.jit
def in_pairs(s):
    """[rows, columns] as [rows, columns / 8, 4, 2]: of the last three axes only the middle one spans threads."""
    return gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])


@gluon.jit
def from_pairs(x, like):
    """The inverse of in_pairs()."""
    return gl.convert_layout(gl.reshape(x, like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def mask_scores(s, seen, j0, LAST: gl.constexpr, FIRST: gl.constexpr):
    """Set scores of keys that a row does not see to -inf. j0: the tile's first key. LAST, FIRST: which limits exist.

    Within a thread columns differ by constants, so that limits are compared with immediates and no register holds a
    column.
    """
    x = in_pairs(s)
    L: gl.constexpr = x.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    eights = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    threads = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    pairs = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    column = eights[None, :][:, :, None][:, :, :, None] * 8 + pairs[None, :][:, None, :][:, :, None, :]
    thread = j0 + 2 * threads[None, :][:, None, :][:, :, :, None]
    if LAST:
        last = gl.convert_layout(seen.last, rows, assert_trivial=True)[:, None][:, :, None][:, :, :, None] - thread
        x = gl.where(column <= last, x, -float("inf"))
    if FIRST:
        first = gl.convert_layout(seen.first, rows, assert_trivial=True)[:, None][:, :, None][:, :, :, None] - thread
        x = gl.where(column >= first, x, -float("inf"))
    return from_pairs(x, s)


@gluon.jit
def scale_of(rule, gain):
    """The factor from q.k to a score."""
    scale = from_bits(rule.scale, gl.float32)
    if rule.descale is not None:
        scale = scale * gain
    return scale


@gluon.jit
def shape_scores(s, rule, seen, j0):
    """Apply softcap and ALiBi. s times unit_of() is the score in base 2."""
    if rule.softcap is not None:
        cap = from_bits(rule.softcap, gl.float32)
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): accurate enough, since a score needs absolute, not relative, accuracy
        e = gl.exp2(s * (scale_of(rule, seen.gain) / cap * 2 * LOG2E))
        s = cap - 2 * cap * reciprocal(1 + e)
    if rule.alibi is not None:
        if rule.softcap is None:
            s = s * scale_of(rule, seen.gain)
        column = j0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        away = (seen.at[:, None] - column[None, :]).to(gl.float32)
        s = s - seen.slope[:, None] * gl.abs(away)
    return s


@gluon.jit
def slope_of(s, rule):
    """The factor of softcap in the gradient of q.k (s); without softcap s itself, which is not read."""
    if rule.softcap is not None:
        e = gl.exp2(s * (from_bits(rule.scale, gl.float32) / from_bits(rule.softcap, gl.float32) * 2 * LOG2E))
        bent = 1 - 2 * reciprocal(1 + e)
        s = 1 - bent * bent
    return s


@gluon.jit
def unit_of(rule, gain):
    """The factor from a shaped score to base 2."""
    if rule.softcap is None and rule.alibi is None:
        return scale_of(rule, gain) * LOG2E
    else:
        return gl.to_tensor(1.4426950408889634)


# ---- rows ----
# Four threads hold the columns of a row. Each has its own copy, [rows, 4], of the row's maximum, the same in all four,
# and of a partial sum. So a tile needs no exchange between threads unless its maximum is searched.


@gluon.constexpr_function
def each_layout(layout):
    """The layout of [rows, 4], from that of in_pairs()."""
    return gl.SliceLayout(1, gl.SliceLayout(3, layout))


@gluon.jit
def to_threads(row, s):
    """[rows] to [rows, 4]: one copy for each thread of a row."""
    EACH: gl.constexpr = each_layout(in_pairs(s).type.layout)
    row = gl.convert_layout(row, gl.SliceLayout(1, EACH), assert_trivial=True)
    return row[:, None] + gl.zeros([s.shape[0], 4], row.dtype, EACH)


@gluon.jit
def broadcast_along(each, x):
    """Broadcast [rows, 4] to a factor or summand of x, the result of in_pairs()."""
    EACH: gl.constexpr = each_layout(x.type.layout)
    return gl.convert_layout(each, EACH, assert_trivial=True)[:, None, :][:, :, :, None]


@gluon.jit
def partial_sums(p, dtype: gl.constexpr):
    """Each thread's partial sum of a row. For 8-bit weights it is the whole sum, which slack_of() needs."""
    if dtype == gl.float8e4nv:
        return to_threads(gl.sum(p, 1), p)
    else:
        return gl.sum(gl.sum(in_pairs(p), 3), 1)


@gluon.jit
def from_threads(each, LAYOUT: gl.constexpr):
    """[rows, 4] to [rows], for numbers that are equal in all threads of a row."""
    return gl.convert_layout(gl.max(each, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def sum_over_threads(l, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The sums of rows, from partial_sums()."""
    if dtype == gl.float8e4nv:
        return from_threads(l, LAYOUT)
    else:
        return gl.convert_layout(gl.sum(l, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def exp2_scores(s, m, unit):
    """P = exp2(s * unit - m)."""
    x = in_pairs(s)
    return from_pairs(gl.exp2(x * unit - broadcast_along(m, x)), s)


@gluon.jit
def scaled(o, factor):
    """o * factor, skipped by warps whose factors are all 1."""
    x = in_pairs(o)
    return from_pairs(scale_unless_one(x, broadcast_along(factor, x)), o)


@gluon.constexpr_function
def lift_of(dtype):
    return LIFT_8.value if dtype == gl.float8e4nv else 0.0


@gluon.jit
def slack_of(l, dtype: gl.constexpr):
    """How far the maximum may lag. The largest 8-bit weight of a row is exact only without a lag."""
    if dtype == gl.float8e4nv:
        return gl.where(l > FLAT_8, SLACK_8, 0.0)
    else:
        return SLACK


@gluon.jit
def weigh_first(s, unit, dtype: gl.constexpr):
    """P of a row's first tile, its maximum and its partial sums. A row that sees none of it has the maximum NO_SCORES.

    With 8-bit values the maximum is lowered by LIFT_8: weights and sums are larger then, and all results stay the same.
    """
    m = to_threads(gl.maximum(gl.max(s, 1) * unit - lift_of(dtype), NO_SCORES), s)
    p = exp2_scores(s, m, unit)
    return p, m, partial_sums(p, dtype)


@gluon.jit
def weigh(s, m, l, unit, dtype: gl.constexpr):
    """P of a later tile, from the larger maximum, and the factor of older sums: eq. 4, in base 2.

    A maximum that has grown little is not updated: results are exact all the same, and weights stay under 2^SLACK.
    """
    top = to_threads(gl.max(s, 1) * unit - lift_of(dtype), s)
    m_new = gl.where(top - m > slack_of(l, dtype), top, m)
    p = exp2_scores(s, m_new, unit)
    factor = gl.exp2(m - m_new)
    return p, m_new, l * factor + partial_sums(p, dtype), factor


@gluon.jit
def weigh_without_max(s, m, l, unit):
    """Like weigh(), without searching the maximum: P is taken from m as it is, and m follows if a row's sum has grown.

    Any m not above the maximum gives the same attention unless something overflows. In bfloat16, as in float32, a
    weight overflows only past 2^127; such a row ends with an infinite sum and is recomputed. m must come from keys that
    the row sees. The factor, a power of two, applies to sums that contain P; scaling by it rounds nothing.
    """
    p = exp2_scores(s, m, unit)
    new = partial_sums(p, gl.bfloat16)
    factor, m = follow_growth(new, m, GROWTH)
    return p, m, (l + new) * factor, factor


@gluon.jit
def pack_weights(p, dtype: gl.constexpr):
    """P packed into integers, to cross the loop's back edge; as 16-bit numbers it would cost permutes there.

    Of 16 columns a thread holds 2t, 2t + 1, 8 + 2t and 8 + 2t + 1. The matrix unit takes four neighbouring 8-bit
    weights from it, so these become neighbours, and transpose_kernel.py puts values in the same order.
    """
    if dtype == gl.float8e4nv:
        x = gl.permute(gl.reshape(p, [p.shape[0], p.shape[1] // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
        even, odd = gl.split(x)
        a, c = gl.split(even)
        b, d = gl.split(odd)
        return gl.reshape(pack_quarters(a, b, c, d), [p.shape[0], p.shape[1] // 4])
    else:
        low, high = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
        return pack_halves(low, high, dtype)


@gluon.jit
def unpack_weights(packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """P as an operand of the matrix unit in registers."""
    if dtype == gl.float8e4nv:
        a = packed.to(gl.int8).to(dtype, bitcast=True)
        b = (packed >> 8).to(gl.int8).to(dtype, bitcast=True)
        c = (packed >> 16).to(gl.int8).to(dtype, bitcast=True)
        d = (packed >> 24).to(gl.int8).to(dtype, bitcast=True)
        p = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [packed.shape[0], 4 * packed.shape[1]])
    else:
        low = packed.to(gl.int16).to(dtype, bitcast=True)
        high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
        p = gl.reshape(gl.join(low, high), [packed.shape[0], 2 * packed.shape[1]])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True)
