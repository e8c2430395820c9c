"""A consumer warpgroup of the backward pass, for any head dim: its walk over query tiles, masks, dK and dV.

backward_up_to_128.py and backward_over_128.py contain the work on one tile of queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon.backward_scheduler import (
    CUT,
    FIRST,
    FLAG,
    HEAD,
    IN_USE,
    KEYS_LEFT,
    LAST,
    NEAREST,
    QUERY,
    ROW,
    SEQUENCE,
    SLOPE,
    WARPGROUP_KEYS,
    load_at,
    read_field,
    tile_slot,
)
from flashtile.backends.gluon.compatibility import send_tile
from flashtile.backends.gluon.softmax import VisibleRange, mask_scores, shape_scores, slope_of
from flashtile.backends.gpu.blocks import from_bits


class Targets(NamedTuple):
    """The outputs: dK and dV, as descriptors and as pointers, and the flags of spoiled tiles."""

    dk_desc: Any
    dv_desc: Any
    dk: Any
    dv: Any
    flags: Any


@gluon.jit
def clear_unused(tile, in_use):
    """Set the rows of a tile that are not in use to 0: their contents could reach dQ."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_r = gl.arange(0, WARPGROUP_KEYS, gl.SliceLayout(1, layout))
    x = tile.load(layout)
    tile.store(gl.where((o_r < in_use)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def walk(
    STEP: gl.constexpr,
    t,
    s,
    dk,
    dv,
    shared,
    descriptor,
    rule,
    unit,
    WG: gl.constexpr,
    C: gl.constexpr,
    DONE: gl.constexpr = 0,
):
    """Run STEP on all query tiles that see the keys, head by head of the group, except the first DONE of them.

    t: the number of tiles before them.
    """
    for g in range(C.GROUP):
        done = DONE - gl.minimum(g, DONE)  # of this head
        if C.GROUP == 1 or DONE == 0:
            for _ in gl.static_range(DONE, C.ALWAYS_CUT):
                s, dk, dv = STEP(t, s, dk, dv, shared, descriptor, rule, unit, WG, True, C)
                t += 1
        else:
            for _ in range(done, C.ALWAYS_CUT):
                s, dk, dv = STEP(t, s, dk, dv, shared, descriptor, rule, unit, WG, True, C)
                t += 1
        for n in gl.static_range(0 if C.CUT_AT_BEGIN else 1, 3 if C.CUT_AT_END else 2):
            for _ in range(gl.maximum(read_field(descriptor, CUT + n), done), read_field(descriptor, CUT + n + 1)):
                s, dk, dv = STEP(t, s, dk, dv, shared, descriptor, rule, unit, WG, n != 1, C)
                t += 1
    return t, dk, dv


@gluon.jit
def shaped(s, t, shared, descriptor, rule, WG: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a tile as the softmax takes them, and softcap's slope.

    The descriptor is read where its fields are needed: few tiles are cut, and registers are scarce.
    """
    slope = slope_of(s, rule)
    if MASKED or rule.alibi is not None:
        in_rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        slot = tile_slot(t)
        seen = seen_by(descriptor, rule, load_at(shared.tile_mailbox, slot + SLOPE), in_rows, WG)
        i0 = load_at(shared.tile_mailbox, slot + QUERY)
        s = shape_scores(s, rule, seen, i0)
        if MASKED:
            s = mask_scores(s, seen, i0, rule.left is not None, rule.right is not None)
    else:
        s = shape_scores(s, rule, VisibleRange(0, 0, 0, 0.0, 1.0), 0)  # only the gain is used
    return s, slope


@gluon.jit
def seen_by(descriptor, rule, slope_at, LAYOUT: gl.constexpr, WG: gl.constexpr):
    """The queries that see each key, from `first` to `last`, if queries had no end."""
    o_j = WG * WARPGROUP_KEYS + gl.arange(0, WARPGROUP_KEYS, LAYOUT)
    last = 0
    if rule.left is not None:
        last = o_j + read_field(descriptor, LAST)
    first = 0
    if rule.right is not None:
        first = o_j + read_field(descriptor, FIRST)
    at = 0
    slope = 0.0
    if rule.alibi is not None:
        at = o_j + read_field(descriptor, NEAREST)
        slope = o_j * 0.0 + gl.load(rule.alibi + slope_at).to(gl.float32)
    return VisibleRange(last, first, at, slope, 1.0)


class Ends(NamedTuple):
    """What a warpgroup needs of its keys after the last tile of queries, when the next task may already be posted."""

    keys_left: Any
    in_use: Any
    sequence: Any
    head: Any
    row: Any
    flag: Any


@gluon.jit
def read_ends(descriptor, row):
    """The Ends of WARPGROUP_KEYS keys from `row` of the task on."""
    keys_left = read_field(descriptor, KEYS_LEFT) - row
    flag = read_field(descriptor, FLAG) + row // WARPGROUP_KEYS
    return Ends(
        keys_left,
        read_field(descriptor, IN_USE) - row,
        read_field(descriptor, SEQUENCE),
        read_field(descriptor, HEAD),
        read_field(descriptor, ROW) + row,
        flag,
    )


@gluon.jit
def finish(dk, dv, dtype: gl.constexpr, ends, rule, C: gl.constexpr):
    """dK and dV of WARPGROUP_KEYS keys as they are stored, and for each key 0, or NaN if it is not finite."""
    dk = dk * from_bits(rule.scale, gl.float32)
    if C.ENDS:
        o_j = gl.arange(0, WARPGROUP_KEYS, gl.SliceLayout(1, dk.type.layout))
        used = (o_j < ends.in_use)[:, None]
        dk = gl.where(used, dk, 0.0)
        dv = gl.where(used, dv, 0.0)
    flaw = gl.sum((dk + dv) * 0.0, 1)
    return dk.to(dtype), dv.to(dtype), flaw


@gluon.jit
def set_flag(targets, flaw, ends):
    """Set the flag of these WARPGROUP_KEYS keys if any of them has a flaw (NaN)."""
    o_j = gl.arange(0, WARPGROUP_KEYS, flaw.type.layout)
    gl.store(targets.flags + (o_j * 0 + ends.flag), o_j * 0 + 1, mask=(o_j < ends.keys_left) & (flaw != 0))


@gluon.jit
def store_gradient(desc, x, block, tile, ends, FIRST_COLUMN: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr):
    """Store WIDTH columns of dK or dV, from shared memory, or from registers at the end of a packed sequence."""
    in_one_piece = ends.keys_left > 0
    if C.PACKED:  # the next sequence begins where this one ends
        in_one_piece = ends.keys_left >= WARPGROUP_KEYS
    if in_one_piece:
        send_tile(desc, [ends.sequence, ends.head, ends.row, FIRST_COLUMN], tile)
    if C.PACKED:
        o_j = gl.arange(0, WARPGROUP_KEYS, gl.SliceLayout(1, block.type.layout))
        o_d = FIRST_COLUMN + gl.arange(0, block.shape[1], gl.SliceLayout(0, block.type.layout))
        p = x.ptr + ends.head.to(gl.int64) * x.head + (ends.row + o_j).to(gl.int64) * x.row
        there = (o_j < ends.keys_left) & (ends.keys_left < WARPGROUP_KEYS)
        gl.store(p[:, None] + o_d[None, :], block, mask=there[:, None] & (o_d < WIDTH)[None, :])
