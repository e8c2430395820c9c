"""The tasks of the backward pass, tiles of keys: their order, the queries that see them, their descriptors.

The loading warp works them out and posts them in a mailbox in shared memory, because the warpgroups have no registers
to spare for numbers that they need once.
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

WARPGROUP_KEYS = gl.constexpr(64)  # of one warpgroup; C.KEYS: of a task
# The fields of a task descriptor. In forward_scheduler.py STATE, SEQUENCE, HEAD, FLAG and read_field() differ.
KEYS_LEFT = gl.constexpr(0)  # keys from the task's first to the end of the sequence
IN_USE = gl.constexpr(1)  # the same for the keys in use
FIRST = gl.constexpr(2)  # the first query that sees the first key
LAST = gl.constexpr(3)  # the last query that sees the first key, if queries had no end
NEAREST = gl.constexpr(4)  # the query from which alibi counts
SEQUENCE = gl.constexpr(5)  # the coordinate for TMA descriptors: 0 if packed
HEAD = gl.constexpr(6)
ROW = gl.constexpr(7)  # of the first key in its tensor
FLAG = gl.constexpr(8)
CUT = gl.constexpr(9)  # CUT..CUT+3: begin, full_begin, full_end and end of the query tiles, relative to begin
CUT_END = gl.constexpr(12)  # the last of these four
STATE = gl.constexpr(13)  # 0: no more tasks
FIELDS = gl.constexpr(14)
# The fields of a tile of queries.
QUERY = gl.constexpr(0)  # its first query
DQ_AT = gl.constexpr(1)  # the position of its dQ
SLOPE = gl.constexpr(2)  # the index of its head's alibi slope
# In a fixed order, the number of tasks that add to this tile of dQ before; negative: not counted.
TURN = gl.constexpr(3)
TILE_FIELDS = gl.constexpr(4)
TILE_SLOTS = gl.constexpr(8)  # tiles whose fields are kept: a warp that writes dQ is up to four tiles behind


@gluon.jit
def task_descriptor(mailbox, n):
    """The descriptor of a program's n-th task. There are two slots: one task may be ending while the next runs."""
    return TaskDescriptor(mailbox, (n & 1) * FIELDS)


@gluon.jit
def read_field(descriptor, field):
    return load_at(descriptor.mailbox, descriptor.begin + field)


@gluon.jit
def write_field(descriptor, field, x):
    store_at(descriptor.mailbox, descriptor.begin + field, x)


class Work(NamedTuple):
    """All the work: tiles of keys (of all sequences if packed), heads, and rows of a head in dQ."""

    rule: Any
    lengths: Any
    tiles: Any
    kv_heads: Any
    section: Any  # the number of last heads that run side by side; see find_key_tile()
    padded: Any
    flag_tiles: Any
    tasks: Any  # tiles of all heads and sequences


class KeyTile(NamedTuple):
    """A task: a tile of keys of one key head of one sequence."""

    sequence: Any
    head: Any
    tile: Any  # of its sequence
    at: Any
    first_keys_first: Any  # the order of turns; else the last keys come first


@gluon.jit
def rematerialize(x, n):
    """x, recomputed for each n < 2^30, so that it need not stay in a register of a warp that has few."""
    return x | (n >> 30)


@gluon.jit
def next_key_tile(counter, turns, work, C: gl.constexpr):
    """The next task and its number. A persistent program skips numbers of packed sequences that have no keys."""
    number = claim_task(counter)
    key_tile = find_key_tile(gl.minimum(number, work.tasks - 1), turns, work, C)
    if work.lengths.cu_k is not None and C.PERSISTENT:
        while (number < work.tasks) & (key_tile.tile * C.KEYS >= key_tile.at.k_rows):
            number = claim_task(counter)
            key_tile = find_key_tile(gl.minimum(number, work.tasks - 1), turns, work, C)
    return key_tile, number


@gluon.jit
def find_key_tile(number, turns, work, C: gl.constexpr):
    """The task of a number, counting tiles of keys, then key heads, then sequences.

    The heads of a section run side by side: first the first key tiles of all of them, which under a causal band have
    the most work, then the second ones. The last heads form such a section, because the first tile of the very last
    head would otherwise run on alone after all other tasks.

    With turns all heads are in sections: tasks of one head wait for each other, and so should not begin together. The
    last keys come first there, except in the last section; no task waits for one that has not begun. Sections before
    the last one have half as many heads, one task per processor, because the cache has to hold dQ and queries of all of
    them. With a window or packed sequences there is no such last section: tasks are short, and with first keys first
    each would wait for its neighbour, and that one for the next.
    """
    all_heads = work.tasks // work.tiles
    head = number // work.tiles
    tile = number % work.tiles
    last = all_heads - work.section
    if turns is not None and (work.rule.left is not None or work.lengths.cu_k is not None):
        last = all_heads
    first_keys_first = head >= last
    first = last  # head of the section
    end = all_heads
    if turns is not None:
        half = (rematerialize(work.section, number) + 1) // 2
        first = gl.where(first_keys_first, last, head // half * half)
        end = gl.where(first_keys_first, all_heads, gl.minimum(first + half, last))
    if head >= first:
        beside = end - first
        inside = number - first * work.tiles
        head = first + inside % beside
        tile = inside // beside
    # The previous kernel cleared dQ; that of the last heads may still be in the cache.
    head = all_heads - 1 - head
    if turns is not None:
        tile = gl.where(first_keys_first, tile, work.tiles - 1 - tile)
    lengths = work.lengths
    sequence, tile = locate(lengths.cu_k, lengths.n_k, tile, head // work.kv_heads, lengths, C.KEYS)
    at = sequence_bounds(lengths, work.rule.offset, sequence)
    return KeyTile(sequence, head % work.kv_heads, tile, at, first_keys_first)


@gluon.jit
def query_tiles(key, at, work, C: gl.constexpr):
    """begin, full_begin, full_end, end of the query tiles that see the keys from `key` on; 1, or 0 if none does.

    In a persistent program, keys that no query sees get a tile too, hidden by the mask or by the end of the keys in
    use, because the task before waits for one.
    """
    # The band with the roles swapped gives them. Rows beyond the last query have no weights, so it cuts no tile.
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
    """reach(), recomputed for each row."""
    if limit is None:
        return reach(limit)
    else:
        return reach(rematerialize(limit, row))


@gluon.jit
def turn_of(key_tile, row, work, C: gl.constexpr):
    """How many tasks add to a tile of queries before this one: those of all later (or all earlier) keys that it sees.

    Negative if only rows beyond the last query see these keys. Such a task adds nothing, and if it counted, a task
    after it could go before its turn.
    """
    rule = work.rule
    at = key_tile.at
    last = gl.minimum(row + C.BLOCK_Q, at.q_len)
    seen = cuts(reach_at(rule.left, row), reach_at(rule.right, row), at.offset, row, last, at.k_len, C.KEYS)
    after = seen[3] - 1 - key_tile.tile
    before = gl.where((after >= 0) & (row < at.q_len), key_tile.tile - seen[0], -1)
    return gl.where(key_tile.first_keys_first, before, after)


@gluon.jit
def post_task(descriptor, key_tile, sequence, key, cut, seen, work):
    """Write the descriptor of a task. sequence: its coordinate for TMA descriptors."""
    at, rule = key_tile.at, work.rule
    write_field(descriptor, STATE, 1)
    write_field(descriptor, KEYS_LEFT, at.k_rows - key)
    write_field(descriptor, IN_USE, (at.k_len - key) * seen)
    write_field(descriptor, FIRST, key - at.offset - reach(rule.right))
    write_field(descriptor, LAST, key - at.offset + reach(rule.left))
    if rule.alibi is not None:
        write_field(descriptor, NEAREST, key - at.offset - plain(rule.alibi_offset))
    write_field(descriptor, SEQUENCE, sequence)
    write_field(descriptor, HEAD, key_tile.head)
    write_field(descriptor, ROW, at.k_start + key)
    write_field(descriptor, CUT, 0)
    write_field(descriptor, CUT + 1, cut[1] - cut[0])
    write_field(descriptor, CUT + 2, cut[2] - cut[0])
    write_field(descriptor, CUT_END, cut[3] - cut[0])
    flag = key // WARPGROUP_KEYS
    if work.lengths.cu_q is not None:
        flag += at.k_start // WARPGROUP_KEYS + key_tile.sequence
    write_field(descriptor, FLAG, (sequence * work.kv_heads + key_tile.head) * work.flag_tiles + flag)
    thread_barrier()  # one lane then continues for the whole warp


@gluon.jit
def tile_slot(t):
    """The index of the first field of tile t."""
    return (t & (TILE_SLOTS - 1)) * TILE_FIELDS


@gluon.jit
def store_at(mailbox, field, x):
    mailbox.index(field).store(gl.full([1], x, gl.int32, LANES))


@gluon.jit
def load_at(mailbox, field):
    return load_scalar(mailbox.index(field))
