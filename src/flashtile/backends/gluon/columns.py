"""Columns: the keys of a task of the backward pass, what is fetched for them, and what is known of them.

The loading warp works out what warpgroups have to know, and posts it on a board in shared memory: they have no
registers to spare for numbers that they need once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.gluon.assembly import sync
from flashtile.backends.gluon.softmax import Seen, hide, shape_scores, slope_of
from flashtile.backends.gluon.tasks import LANES, claim, leave, one
from flashtile.backends.gluon.words import fetch_tile, send_tile, thread_barrier
from flashtile.backends.triton.blocks import locate, measure, number
from flashtile.backends.triton.cuts import cuts, reach
from flashtile.backends.triton.steady import plain

KEYS = gl.constexpr(64)  # of a tile that a warpgroup works on
WARPGROUPS = gl.constexpr(256)  # threads
ALL = gl.constexpr(288)  # and the warp that loads
EVERYONE = gl.constexpr(352)  # and those that write dQ: all who read the board, or write it
# Named barriers; the others are the kernels' own.
KV_FREE = gl.constexpr(9)
Q_FREE = gl.constexpr(10)
DO_FREE = gl.constexpr(12)
TOGETHER = gl.constexpr(15)


class Tiles(NamedTuple):
    """What is in shared memory. q and rows come in two buffers, by parity; dout in C.DOUT_STAGES; orders in ORDERS.

    dq has C.DQ_BUFFERS a warpgroup, which other warps write to memory.
    """

    k: Any
    v: Any
    q: Any
    dout: Any
    rows: Any  # lse in base 2, and delta
    orders: Any  # TILE_FIELDS numbers for each tile of queries
    p: Any  # float32, where one warpgroup makes P for both; else None
    ds: Any
    dq: Any
    out: Any  # the same memory, as dK and dV of both warpgroups leave by it; None where these leave otherwise
    k_full: Any
    v_full: Any
    q_full: Any
    dout_full: Any
    dq_full: Any
    dq_free: Any


# What warpgroups have to know of their keys.
KEY = gl.constexpr(0)  # the task's first
ROOM = gl.constexpr(1)  # keys from there to the end of the sequence
IN_USE = gl.constexpr(2)  # likewise, of those in use
OFFSET = gl.constexpr(3)  # of the band
SEQUENCE = gl.constexpr(4)  # as descriptors count: 0 where sequences are packed
HEAD = gl.constexpr(5)
ROW = gl.constexpr(6)  # of the first key, where the tensor begins being 0
MARK = gl.constexpr(7)
CUT = gl.constexpr(8)  # 0, and how many tiles of queries later whole ones begin, whole ones end, and all end
GO = gl.constexpr(12)  # 0: there is no task any more
FIELDS = gl.constexpr(13)
# And of a tile of queries.
QUERY = gl.constexpr(0)  # its first
DQ_AT = gl.constexpr(1)  # where its dQ lies
SLOPE = gl.constexpr(2)  # where alibi has that of its head
TURN = gl.constexpr(3)  # how many tasks add to this tile of dQ before, if in a fixed order; under 0: it is not counted
TILE_FIELDS = gl.constexpr(4)
ORDERS = gl.constexpr(8)  # tiles whose orders are kept: a warp that writes dQ is up to four tiles behind


class Ends(NamedTuple):
    """What is left to know of a warpgroup's keys when the tiles of queries are done. The board is free then."""

    room: Any
    in_use: Any
    sequence: Any
    head: Any
    row: Any
    mark: Any


class Sources(NamedTuple):
    """Where tiles come from."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any


class Targets(NamedTuple):
    """Where dK and dV go, also by hand, and marks of tiles that came out spoiled."""

    dk_desc: Any
    dv_desc: Any
    dk: Any
    dv: Any
    marks: Any


class Extent(NamedTuple):
    """What there is to do: tiles of keys (of all sequences where they are packed), heads, rows of a head in dQ."""

    rule: Any
    lengths: Any
    tiles: Any
    kv_heads: Any
    section: Any  # heads, the last ones, that are worked on side by side
    padded: Any
    mark_tiles: Any
    tasks: Any  # tiles of all heads and sequences


class Column(NamedTuple):
    """A task: a tile of keys of one key head of one sequence."""

    sequence: Any
    head: Any
    tile: Any  # of its sequence
    at: Any
    first_keys_first: Any  # the order of turns


@gluon.jit
def load(shared, board, sources, counter, turns, work, C: gl.constexpr):
    """Fetch, for one task after the other, its keys and values, and the tiles of queries that see them.

    The first of these come before the keys: warpgroups may still be busy with the keys of the task before.
    """
    lengths = work.lengths
    t = gl.to_tensor(0)
    n = gl.to_tensor(0)
    column, number = next_column(counter, turns, work, C)
    while number < work.tasks:
        at = column.at
        key = column.tile * C.KEYS
        place = column.sequence  # as descriptors count sequences
        dq_row = 0
        if lengths.cu_q is not None:
            place = 0
            dq_row = (at.q_start // C.KEYS + column.sequence) * C.KEYS
        begin, full_begin, full_end, end, seen = query_tiles(key, at, work, C)
        h = column.head * C.GROUP
        row = begin * C.BLOCK_Q
        count = C.GROUP * (end - begin)
        for i in range(count + 1):
            if i == gl.minimum(count, 1):
                if C.PERSISTENT and n > 0:
                    sync(KV_FREE, EVERYONE)
                mbarrier.expect(shared.k_full, sources.k.block_type.nbytes)
                k_at = [place, column.head, at.k_start + key, 0]
                fetch_tile(sources.k, k_at, shared.k_full, shared.k.index(0))
                cut = (begin, full_begin, full_end, end)
                post(board, column, place, key, cut, seen, work)
                mbarrier.expect(shared.v_full, sources.v.block_type.nbytes)  # after the board, for which it speaks too
                fetch_tile(sources.v, k_at, shared.v_full, shared.v.index(0))
            if i < count:
                q_at = [place, h, at.q_start + row, 0]
                if C.DOUT_STAGES == 2:
                    fetch_dout(shared, sources, q_at, t, C)
                # All else before its buffer is free: warpgroups wait for these queries, and for nothing as long.
                order = order_of(t)
                dq_head = (place * work.kv_heads * C.GROUP + h) * work.padded + dq_row
                put(shared.orders, order + QUERY, row)
                put(shared.orders, order + DQ_AT, (dq_head + row) // 64 * (C.BLOCK_D // 64) * 16)
                put(shared.orders, order + SLOPE, column.sequence * work.rule.alibi_sequence + h * work.rule.alibi_head)
                if turns is not None:
                    turn = turn_of(column, row, work, C)
                    put(shared.orders, order + TURN, turn * seen + seen - 1)
                thread_barrier()  # the lane that speaks next speaks for all of them
                fetch_queries(shared, sources, q_at, [0, place, h, dq_row + row], t)
                if C.DOUT_STAGES == 1:
                    fetch_dout(shared, sources, q_at, t, C)
                t += 1
                row += C.BLOCK_Q
                if row == end * C.BLOCK_Q:
                    row = begin * C.BLOCK_Q
                    h += 1
        n += 1
        if C.PERSISTENT:
            column, number = next_column(counter, turns, work, C)
        else:
            number = work.tasks
    # Meet all arrivals. The last tile waits for one more, of which the scores are not used.
    if t >= 2:
        sync(Q_FREE + (t & 1), ALL)
    mbarrier.arrive(shared.q_full.index(t & 1), count=1)
    if t >= C.DOUT_STAGES:
        sync(DO_FREE + t % C.DOUT_STAGES, ALL)
    if C.DOUT_STAGES == 1:
        mbarrier.arrive(shared.dout_full.index(0), count=1)
    if t >= 1:
        sync(Q_FREE + ((t + 1) & 1), ALL)
        if C.DOUT_STAGES == 2:
            sync(DO_FREE + ((t + 1) & 1), ALL)
    if C.PERSISTENT:
        if n > 0:
            sync(KV_FREE, EVERYONE)
        put(board, GO, 0)
        thread_barrier()
        mbarrier.arrive(shared.v_full, count=1)
    leave(counter)


@gluon.jit
def fetch_queries(shared, sources, at, rows_at, t):
    """Send for Q of tile t, and for what is known of its rows, once the buffer is free."""
    half = t & 1
    full = shared.q_full.index(half)
    if t >= 2:
        sync(Q_FREE + half, ALL)
    mbarrier.expect(full, sources.q.block_type.nbytes + sources.rows.block_type.nbytes)
    fetch_tile(sources.q, at, full, shared.q.index(half))
    fetch_tile(sources.rows, rows_at, full, shared.rows.index(half))


@gluon.jit
def fetch_dout(shared, sources, at, t, C: gl.constexpr):
    """Likewise dO of tile t. Of two buffers one is free sooner than that of the queries, and is filled first."""
    slot = t % C.DOUT_STAGES
    full = shared.dout_full.index(slot)
    if t >= C.DOUT_STAGES:
        sync(DO_FREE + slot, ALL)
    mbarrier.expect(full, sources.dout.block_type.nbytes)
    fetch_tile(sources.dout, at, full, shared.dout.index(slot))


@gluon.jit
def next_column(counter, turns, work, C: gl.constexpr):
    """The next task, and its number. Of packed sequences there may be fewer than numbers: a program that takes one
    task after the other passes over those without keys.
    """
    number = claim(counter)
    column = find_column(gl.minimum(number, work.tasks - 1), turns, work, C)
    if work.lengths.cu_k is not None and C.PERSISTENT:
        while (number < work.tasks) & (column.tile * C.KEYS >= column.at.k_room):
            number = claim(counter)
            column = find_column(gl.minimum(number, work.tasks - 1), turns, work, C)
    return column, number


@gluon.jit
def find_column(number, turns, work, C: gl.constexpr):
    """The task of a number: tiles of keys, then key heads, then sequences.

    The heads of a section come side by side: first tiles of keys, which a causal band gives most to do, of all of them,
    then the second. So it is for the last heads: such a tile of the very last head would go on alone when all others
    have ended. With turns it is so for all heads: tasks of one head wait for each other, and begin one after the other.
    There the last keys come first, but not in the last section. Nobody waits for a task that has not begun.
    """
    columns = work.tasks // work.tiles
    column = number // work.tiles
    tile = number % work.tiles
    last = columns - work.section
    first_keys_first = column >= last
    first = last  # head of a section
    end = columns
    if turns is not None:
        first = gl.where(first_keys_first, last, column // work.section * work.section)
        end = gl.where(first_keys_first, columns, gl.minimum(first + work.section, last))
    if column >= first:
        beside = end - first
        inside = number - first * work.tiles
        column = first + inside % beside
        tile = inside // beside
    # Of dQ, which the kernel before this one cleared, the last heads may still be in the cache.
    column = columns - 1 - column
    if turns is not None:
        tile = gl.where(first_keys_first, tile, work.tiles - 1 - tile)
    lengths = work.lengths
    sequence, tile = locate(lengths.cu_k, lengths.n_k, tile, column // work.kv_heads, lengths, C.KEYS)
    at = measure(lengths, work.rule.offset, sequence)
    return Column(sequence, column % work.kv_heads, tile, at, first_keys_first)


@gluon.jit
def query_tiles(key, at, work, C: gl.constexpr):
    """begin, full_begin, full_end, end of the tiles of queries that see the keys from `key` on; 1, or 0 if none does.

    Where a program takes one task after the other, those that nobody sees get a tile too, hidden by what mask there is,
    or of keys that are not in use: the task before waits for one.
    """
    # The band with the roles swapped says which. Rows beyond the last query have no weights: no tile is cut by it.
    rule = work.rule
    last = gl.maximum(gl.minimum(key + C.KEYS, at.k_len), key + 1)
    n_q = at.q_len * (key < at.k_len).to(gl.int32)
    begin, full_begin, full_end, end = cuts(reach(rule.right), reach(rule.left), -at.offset, key, last, n_q, C.BLOCK_Q)
    seen = (begin < end).to(gl.int32)
    if rule.left is None:
        full_end = end
    if C.ALWAYS_CUT > 0:
        end = gl.maximum(end, begin + C.ALWAYS_CUT * (key < at.k_len).to(gl.int32))
        full_begin = begin + C.ALWAYS_CUT
        full_end = end
        seen = gl.to_tensor(1)
    elif C.PERSISTENT:
        hidden = 1 - seen
        begin = begin * seen
        full_begin = full_begin * seen + (hidden if C.CUT_AT_BEGIN else 0)
        full_end = full_end * seen + (0 if C.CUT_AT_END and not C.CUT_AT_BEGIN else hidden)
        end = end * seen + hidden
    return begin, full_begin, full_end, end, seen


@gluon.jit
def post(board, column, place, key, cut, seen, work):
    """Write what warpgroups have to know."""
    at = column.at
    put(board, GO, 1)
    put(board, KEY, key)
    put(board, ROOM, at.k_room - key)
    put(board, IN_USE, (at.k_len - key) * seen)
    put(board, OFFSET, at.offset)
    put(board, SEQUENCE, place)
    put(board, HEAD, column.head)
    put(board, ROW, at.k_start + key)
    put(board, CUT, 0)
    put(board, CUT + 1, cut[1] - cut[0])
    put(board, CUT + 2, cut[2] - cut[0])
    put(board, CUT + 3, cut[3] - cut[0])
    mark = key // KEYS
    if work.lengths.cu_q is not None:
        mark += at.k_start // KEYS + column.sequence
    put(board, MARK, (place * work.kv_heads + column.head) * work.mark_tiles + mark)
    thread_barrier()  # the lane that speaks next speaks for all of them


@gluon.jit
def turn_of(column, row, work, C: gl.constexpr):
    """How many tasks come before that of these keys at a tile of queries: those of all later keys it sees, or of all
    earlier ones.

    Under 0 where only rows beyond the last query see these keys. That adds nothing, and if it were counted, a task
    after it could go before its turn.
    """
    rule = work.rule
    at = column.at
    last = gl.minimum(row + C.BLOCK_Q, at.q_len)
    seen = cuts(reach(rule.left), reach(rule.right), at.offset, row, last, at.k_len, C.KEYS)
    after = seen[3] - 1 - column.tile
    before = gl.where((after >= 0) & (row < at.q_len), column.tile - seen[0], -1)
    return gl.where(column.first_keys_first, before, after)


@gluon.jit
def clear_unused(tile, in_use):
    """0 for the rows of a tile that are not in use: whatever stood there could reach dQ."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_r = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
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
    board,
    rule,
    unit,
    ME: gl.constexpr,
    C: gl.constexpr,
    DONE: gl.constexpr = 0,
):
    """All tiles of queries that see some keys, of one head of the group after the other, but the first DONE of them.

    t: tiles before them.
    """
    for g in range(C.GROUP):
        done = DONE - gl.minimum(g, DONE)  # of this head
        if C.GROUP == 1 or DONE == 0:
            for _ in gl.static_range(DONE, C.ALWAYS_CUT):
                s, dk, dv = STEP(t, s, dk, dv, shared, board, rule, unit, ME, True, C)
                t += 1
        else:
            for _ in range(done, C.ALWAYS_CUT):
                s, dk, dv = STEP(t, s, dk, dv, shared, board, rule, unit, ME, True, C)
                t += 1
        for n in gl.static_range(0 if C.CUT_AT_BEGIN else 1, 3 if C.CUT_AT_END else 2):
            for _ in range(gl.maximum(get(board, CUT + n), done), get(board, CUT + n + 1)):
                s, dk, dv = STEP(t, s, dk, dv, shared, board, rule, unit, ME, n != 1, C)
                t += 1
    return t, dk, dv


@gluon.jit
def order_of(t):
    """Where the orders of tile t begin."""
    return (t & (ORDERS - 1)) * TILE_FIELDS


@gluon.jit
def shaped(s, t, shared, board, rule, ME: gl.constexpr, MASKED: gl.constexpr):
    """Scores of a tile as the softmax takes them, and softcap's slope.

    What is known of the keys is read from the board where it is needed: few tiles are cut, and registers are scarce.
    """
    slope = slope_of(s, rule)
    if MASKED or rule.alibi is not None:
        in_rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        order = order_of(t)
        seen = seen_by(board, rule, get(shared.orders, order + SLOPE), in_rows, ME)
        i0 = get(shared.orders, order + QUERY)
        s = shape_scores(s, rule, seen, i0)
        if MASKED:
            s = hide(s, seen, i0, rule.left is not None, rule.right is not None)
    else:
        s = shape_scores(s, rule, Seen(0, 0, 0, 0.0, 1.0), 0)  # of which it uses nothing but the gain
    return s, slope


@gluon.jit
def seen_by(board, rule, slope_at, LAYOUT: gl.constexpr, ME: gl.constexpr):
    """The queries that see each key, were there no end of queries: from `first` to `last`."""
    o_j = ME * KEYS + gl.arange(0, KEYS, LAYOUT)
    o_j += get(board, KEY) - get(board, OFFSET)
    last = 0
    if rule.left is not None:
        last = o_j + reach(rule.left)
    first = 0
    if rule.right is not None:
        first = o_j - reach(rule.right)
    at = 0
    slope = 0.0
    if rule.alibi is not None:
        at = o_j - plain(rule.alibi_offset)
        slope = o_j * 0.0 + gl.load(rule.alibi + slope_at).to(gl.float32)
    return Seen(last, first, at, slope, 1.0)


@gluon.jit
def read_ends(board, row):
    """Of KEYS keys from `row` of the task on."""
    room = get(board, ROOM) - row
    mark = get(board, MARK) + row // KEYS
    return Ends(room, get(board, IN_USE) - row, get(board, SEQUENCE), get(board, HEAD), get(board, ROW) + row, mark)


@gluon.jit
def finished(dk, dv, dtype: gl.constexpr, ends, rule, C: gl.constexpr):
    """dK and dV of KEYS keys, as they are stored; 0 for each, or NaN where not finite."""
    dk = dk * number(rule.scale, gl.float32)
    if C.ENDS:
        o_j = gl.arange(0, KEYS, gl.SliceLayout(1, dk.type.layout))
        used = (o_j < ends.in_use)[:, None]
        dk = gl.where(used, dk, 0.0)
        dv = gl.where(used, dv, 0.0)
    flaw = gl.sum((dk + dv) * 0.0, 1)
    return dk.to(dtype), dv.to(dtype), flaw


@gluon.jit
def mark_spoiled(targets, flaw, ends):
    """Set the mark of these KEYS keys where any of them has a flaw."""
    o_j = gl.arange(0, KEYS, flaw.type.layout)
    gl.store(targets.marks + (o_j * 0 + ends.mark), o_j * 0 + 1, mask=(o_j < ends.room) & (flaw != 0))


@gluon.jit
def store_columns(desc, x, block, tile, ends, FIRST_COLUMN: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr):
    """dK or dV, of WIDTH columns, of KEYS keys: in registers, and in shared memory."""
    whole = ends.room > 0
    if C.PACKED:  # the next sequence begins where this one ends
        whole = ends.room >= KEYS
    if whole:
        send_tile(desc, [ends.sequence, ends.head, ends.row, FIRST_COLUMN], tile)
    if C.PACKED:
        o_j = gl.arange(0, KEYS, gl.SliceLayout(1, block.type.layout))
        o_d = FIRST_COLUMN + gl.arange(0, block.shape[1], gl.SliceLayout(0, block.type.layout))
        p = x.ptr + ends.head.to(gl.int64) * x.head + (ends.row + o_j).to(gl.int64) * x.row
        there = (o_j < ends.room) & (ends.room < KEYS)
        gl.store(p[:, None] + o_d[None, :], block, mask=there[:, None] & (o_d < WIDTH)[None, :])


@gluon.jit
def put(board, field, x):
    board.index(field).store(gl.full([1], x, gl.int32, LANES))


@gluon.jit
def get(board, field):
    return one(board.index(field))
