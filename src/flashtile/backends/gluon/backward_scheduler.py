"""Columns: the tasks of the backward pass, tiles of keys; which comes when, who sees them, and what is read_field of them.

The loading warp works it out, and posts it on a board in shared memory: warpgroups have no registers to spare for
numbers that they need once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon.compatibility import thread_barrier
from flashtile.backends.gluon.forward_scheduler import LANES, TaskDescriptor, claim_task, load_scalar
from flashtile.backends.gpu.blocks import locate, sequence_bounds
from flashtile.backends.gpu.cuts import cuts, reach
from flashtile.backends.gpu.unspecialized import plain

KEYS = gl.constexpr(64)  # of a tile that a warpgroup works on
# What warpgroups have to know of their keys.
KEYS_LEFT = gl.constexpr(0)  # keys from the task's first to the end of the sequence
IN_USE = gl.constexpr(1)  # likewise, of those in use
FIRST = gl.constexpr(2)  # the first query that sees the first key
LAST = gl.constexpr(3)  # and the last, were there no end of queries
NEAREST = gl.constexpr(4)  # that from which alibi counts
SEQUENCE = gl.constexpr(5)  # as descriptors count: 0 where sequences are packed
HEAD = gl.constexpr(6)
ROW = gl.constexpr(7)  # of the first key, where the tensor begins being 0
FLAG = gl.constexpr(8)
CUT = gl.constexpr(9)  # 0, and how many tiles of queries later whole ones begin, whole ones end, and all end
STATE = gl.constexpr(13)  # 0: there is no task any more
FIELDS = gl.constexpr(14)
# And of a tile of queries.
QUERY = gl.constexpr(0)  # its first
DQ_AT = gl.constexpr(1)  # where its dQ lies
SLOPE = gl.constexpr(2)  # where alibi has that of its head
TURN = gl.constexpr(3)  # how many tasks add to this tile of dQ before, if in a fixed order; under 0: it is not counted
TILE_FIELDS = gl.constexpr(4)
TILE_SLOTS = gl.constexpr(8)  # tiles whose orders are kept: a warp that writes dQ is up to four tiles behind


@gluon.jit
def task_descriptor(memory, n):
    """The orders of the n-th task of a program. Two have keys_left: one may be ending while the next runs."""
    return TaskDescriptor(memory, (n & 1) * FIELDS)


@gluon.jit
def read_field(orders, field):
    return get(orders.board, orders.begin + field)


@gluon.jit
def write_field(orders, field, x):
    put(orders.board, orders.begin + field, x)


class Work(NamedTuple):
    """What there is to do: tiles of keys (of all sequences where they are packed), heads, rows of a head in dQ."""

    rule: Any
    lengths: Any
    tiles: Any
    kv_heads: Any
    section: Any  # heads, the last ones, that are worked on side by side; see find_key_tile()
    padded: Any
    flag_tiles: Any
    tasks: Any  # tiles of all heads and sequences


class KeyTile(NamedTuple):
    """A task: a tile of keys of one key head of one sequence."""

    sequence: Any
    head: Any
    tile: Any  # of its sequence
    at: Any
    first_keys_first: Any  # the order of turns


@gluon.jit
def rematerialize(x, n):
    """x, made anew for each n, which is under 2^30: it need not wait in a register of a warp that has few."""
    return x | (n >> 30)


@gluon.jit
def next_key_tile(counter, turns, work, C: gl.constexpr):
    """The next task, and its number. Of packed sequences there may be fewer than numbers: a program that takes one
    task after the other passes over those without keys.
    """
    number = claim_task(counter)
    column = find_key_tile(gl.minimum(number, work.tasks - 1), turns, work, C)
    if work.lengths.cu_k is not None and C.PERSISTENT:
        while (number < work.tasks) & (column.tile * C.KEYS >= column.at.k_rows):
            number = claim_task(counter)
            column = find_key_tile(gl.minimum(number, work.tasks - 1), turns, work, C)
    return column, number


@gluon.jit
def find_key_tile(number, turns, work, C: gl.constexpr):
    """The task of a number: tiles of keys, then key heads, then sequences.

    The heads of a section come side by side: first tiles of keys, which a causal band gives most to do, of all of them,
    then the second. So it is for the last heads: such a tile of the very last head would go on alone when all others
    have ended. With turns it is so for all heads: tasks of one head wait for each other, and begin one after the other.
    There the last keys come first, but not in the last section. Nobody waits for a task that has not begun. Before the
    last section half as many heads do, one task a processor: the cache has to hold dQ and queries of all of them. With
    a window, or packed sequences, there is no such last section: tasks are short, and with first keys first each would
    wait for its neighbour, and that for the next.
    """
    columns = work.tasks // work.tiles
    column = number // work.tiles
    tile = number % work.tiles
    last = columns - work.section
    if turns is not None and (work.rule.left is not None or work.lengths.cu_k is not None):
        last = columns
    first_keys_first = column >= last
    first = last  # head of a section
    end = columns
    if turns is not None:
        half = (rematerialize(work.section, number) + 1) // 2
        first = gl.where(first_keys_first, last, column // half * half)
        end = gl.where(first_keys_first, columns, gl.minimum(first + half, last))
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
    at = sequence_bounds(lengths, work.rule.offset, sequence)
    return KeyTile(sequence, column % work.kv_heads, tile, at, first_keys_first)


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
def reach_at(limit, row):
    """reach(), made anew for each row."""
    if limit is None:
        return reach(limit)
    else:
        return reach(rematerialize(limit, row))


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
    seen = cuts(reach_at(rule.left, row), reach_at(rule.right, row), at.offset, row, last, at.k_len, C.KEYS)
    after = seen[3] - 1 - column.tile
    before = gl.where((after >= 0) & (row < at.q_len), column.tile - seen[0], -1)
    return gl.where(column.first_keys_first, before, after)


@gluon.jit
def post_task(board, column, place, key, cut, seen, work):
    """Write what warpgroups have to know."""
    at, rule = column.at, work.rule
    write_field(board, STATE, 1)
    write_field(board, KEYS_LEFT, at.k_rows - key)
    write_field(board, IN_USE, (at.k_len - key) * seen)
    write_field(board, FIRST, key - at.offset - reach(rule.right))
    write_field(board, LAST, key - at.offset + reach(rule.left))
    if rule.alibi is not None:
        write_field(board, NEAREST, key - at.offset - plain(rule.alibi_offset))
    write_field(board, SEQUENCE, place)
    write_field(board, HEAD, column.head)
    write_field(board, ROW, at.k_start + key)
    write_field(board, CUT, 0)
    write_field(board, CUT + 1, cut[1] - cut[0])
    write_field(board, CUT + 2, cut[2] - cut[0])
    write_field(board, CUT + 3, cut[3] - cut[0])
    flag = key // KEYS
    if work.lengths.cu_q is not None:
        flag += at.k_start // KEYS + column.sequence
    write_field(board, FLAG, (place * work.kv_heads + column.head) * work.flag_tiles + flag)
    thread_barrier()  # the lane that speaks next speaks for all of them


@gluon.jit
def tile_slot(t):
    """Where the orders of tile t begin."""
    return (t & (TILE_SLOTS - 1)) * TILE_FIELDS


@gluon.jit
def put(board, field, x):
    board.index(field).store(gl.full([1], x, gl.int32, LANES))


@gluon.jit
def get(board, field):
    return load_scalar(board.index(field))
