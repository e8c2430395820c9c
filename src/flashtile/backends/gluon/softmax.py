"""A tile of scores in registers -> weights, with the running maximum and sum of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon.assembly import give_turn, pack_halves, pack_quarters, take_turn
from flashtile.backends.triton.blocks import number
from flashtile.backends.triton.scores import LOG2E

NOTHING = gl.constexpr(-1e30)  # the maximum of no scores: finite, so that it can be taken off -inf
SLACK = gl.constexpr(8.0)  # a maximum that has grown by less than this, in base 2, is left as it is
# Of e4m3, which ends at 448 and keeps its 3 bits down to 2^-6: weights begin at 2^LIFT_8 and stay under 2^8.
LIFT_8 = gl.constexpr(6.0)
SLACK_8 = gl.constexpr(2.0)
FLAT_8 = gl.constexpr(1024.0)  # SLACK_8 is for rows whose sum is larger: no weight is over a quarter of it
GROWTH = gl.constexpr(16)  # a tile whose weights add up to more than 2^GROWTH makes the maximum follow


class Seen(NamedTuple):
    """The rows of a warpgroup: the last and the first key that each sees, where it stands, and its alibi slope.

    gain: what descaling multiplies q.k with, where the rule has it.
    """

    last: Any
    first: Any
    at: Any
    slope: Any
    gain: Any


@gluon.jit
def in_pairs(s):
    """[rows, columns] as [rows, columns / 8, 4, 2]: of the last three only the middle one differs between threads."""
    return gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])


@gluon.jit
def hide(s, seen, j0, LAST: gl.constexpr, FIRST: gl.constexpr):
    """-inf for the keys that a row does not see. j0: the first key of the tile. LAST, FIRST: whether there is a limit.

    Columns differ between the values of a thread by constants, so that limits are compared with immediates, and no
    register holds a column.
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
    return gl.convert_layout(gl.reshape(x, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def scale_of(rule, gain):
    """What q.k is multiplied with to be a score."""
    scale = number(rule.scale, gl.float32)
    if rule.descale is not None:
        scale = scale * gain
    return scale


@gluon.jit
def shape_scores(s, rule, seen, j0):
    """softcap and alibi. s times the rule's unit is the score in base 2."""
    if rule.softcap is not None:
        cap = number(rule.softcap, gl.float32)
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): as exact as a score needs to be, which is not relative to itself
        e = gl.exp2(s * (scale_of(rule, seen.gain) / cap * 2 * LOG2E))
        s = cap - gl.fdiv(2 * cap, 1 + e)
    if rule.alibi is not None:
        if rule.softcap is None:
            s = s * scale_of(rule, seen.gain)
        column = j0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        away = (seen.at[:, None] - column[None, :]).to(gl.float32)
        s = s - seen.slope[:, None] * gl.abs(away)
    return s


@gluon.jit
def slope_of(s, rule):
    """What softcap multiplies the gradient of q.k (s) with; s itself, which nobody reads, where there is none."""
    if rule.softcap is not None:
        e = gl.exp2(s * (number(rule.scale, gl.float32) / number(rule.softcap, gl.float32) * 2 * LOG2E))
        bent = 1 - gl.fdiv(2.0, 1 + e)
        s = 1 - bent * bent
    return s


@gluon.jit
def unit_of(rule, gain):
    """What a shaped score is multiplied with to be one in base 2."""
    if rule.softcap is None and rule.alibi is None:
        return scale_of(rule, gain) * LOG2E
    else:
        return gl.to_tensor(1.4426950408889634)


@gluon.jit
def row_sum(p):
    """[rows], each in the threads that have the row."""
    return gl.sum(p, 1)


@gluon.jit
def weigh_first(s, unit):
    """P of a row's first tile, its maximum and its sum; NOTHING is the maximum of a row that sees none of it."""
    m = gl.maximum(gl.max(s, 1) * unit, NOTHING)
    p = gl.exp2(s * unit - m[:, None])
    return p, m, row_sum(p)


@gluon.jit
def weigh(s, m, l, unit):
    """P of a later tile, taken from the larger maximum, and what older sums are multiplied with: eq. 4, in base 2.

    A maximum that has grown little stays as it is: it is exact too, and weights stay under 2^SLACK.
    """
    top = gl.max(s, 1) * unit
    m_new = gl.where(top - m > SLACK, top, m)
    p = gl.exp2(s * unit - m_new[:, None])
    factor = gl.exp2(m - m_new)
    return p, m_new, l * factor + row_sum(p), factor


@gluon.jit
def part_sums(p):
    """[rows, 4]: what a thread adds up alone."""
    return gl.sum(gl.sum(in_pairs(p), 3), 1)


@gluon.jit
def part_sums_twice(p, LAYOUT: gl.constexpr, EARLY: gl.constexpr):
    """part_sums(), and what they are before the last columns."""
    if EARLY:
        N: gl.constexpr = p.shape[1] // 4
        a, b = gl.split(gl.permute(gl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), (0, 2, 1)))
        b, c = gl.split(gl.permute(gl.reshape(b, [p.shape[0], 2, N]), (0, 2, 1)))
        nearly = gl.convert_layout(part_sums(a), LAYOUT, assert_trivial=True)
        nearly += gl.convert_layout(part_sums(b), LAYOUT, assert_trivial=True)
        return nearly + gl.convert_layout(part_sums(c), LAYOUT, assert_trivial=True), nearly
    else:
        new = part_sums(p)
        return new, new


@gluon.jit
def along(x, l):
    """A number for each row, beside sums of a row's parts."""
    rows: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    return gl.convert_layout(x, rows, assert_trivial=True)[:, None]


@gluon.jit
def whole_sum(l, LAYOUT: gl.constexpr):
    return gl.convert_layout(gl.sum(l, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def weigh_8(s, m, l, unit, EARLY: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr, THREADS: gl.constexpr):
    """weigh() for 8-bit weights, of the first tile too; exponentials wait for this warpgroup's turn.

    The maximum is said to be less than it is: weights and sums are larger then, and all else holds. How far it may stay
    behind depends on the row: the largest of 8-bit weights is exact only where it does not. l: sums of a row's parts.
    """
    rows: gl.constexpr = m.type.layout
    top = gl.max(s, 1) * unit - LIFT_8
    slack = gl.where(whole_sum(l, rows) > FLAT_8, SLACK_8, 0.0)
    m_new = gl.where(top - m > slack, top, m)
    factor = gl.exp2(m - m_new)
    if MINE is not None:
        take_turn(m_new, MINE, THREADS)
    p = gl.exp2(s * unit - m_new[:, None])
    parts: gl.constexpr = l.type.layout
    new, nearly = part_sums_twice(p, parts, EARLY)
    if MINE is not None:
        give_turn(nearly, NEXT, THREADS)
    return p, m_new, l * along(factor, l) + new, factor


@gluon.jit
def weigh_on_trust(s, m, l, unit):
    """The same without a maximum: P is taken from m as it stands, and m follows where the sum of a row has grown.

    Any m that is not above the maximum gives the same attention as long as nothing overflows, and in bfloat16, as in
    float32, a weight does so only past 2^127. Such a row ends with an infinite sum and is mended. m must be that of
    keys that the row sees. The factor is for sums that contain P.
    """
    p = gl.exp2(s * unit - m[:, None])
    new = row_sum(p)
    exponent = (new.to(gl.int32, bitcast=True) >> 23) - 127
    exponent = gl.where(exponent > GROWTH, gl.minimum(exponent, 126), 0)
    factor = ((127 - exponent) << 23).to(gl.float32, bitcast=True)  # a power of two: scaling by it rounds nothing
    return p, m + exponent.to(gl.float32), (l + new) * factor, factor


@gluon.jit
def carried(p, dtype: gl.constexpr):
    """P as it crosses the back edge of the loop: packed into integers. As 16-bit numbers they cost permutes.

    Of 16 columns a thread has 2t, 2t + 1, 8 + 2t and 8 + 2t + 1, and the matrix unit takes four neighbours of 8 bits
    from it: so these become neighbours, and transpose_kernel.py has the values in the same order.
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
def operand(packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """P as the matrix unit takes it from registers."""
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
