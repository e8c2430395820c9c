"""Columns: the keys that a program of the backward pass owns, what it fetches for them, and what it knows of them.

The loading warp works out what warpgroups have to know, and posts it on a board in shared memory: they have no
registers to spare for numbers that they need once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashtile.backends.gluon.assembly import reduce_add, sync
from flashtile.backends.gluon.softmax import Seen, hide, shape_scores, slope_of
from flashtile.backends.gluon.tasks import LANES, ONE_EACH
from flashtile.backends.triton.blocks import measure
from flashtile.backends.triton.cuts import cuts, reach
from flashtile.backends.triton.steady import plain

KEYS = gl.constexpr(64)  # of a tile that a warpgroup works on
WARPGROUPS = gl.constexpr(256)  # threads
ALL = gl.constexpr(288)  # and the warp that loads
# Named barriers; those under 10 are the kernels' own.
Q_FREE = gl.constexpr(10)
DO_FREE = gl.constexpr(12)
END_OF_LOOP = gl.constexpr(15)
# A 64 x 64 tile of dQ lies as 128 threads hold it, so that it is stored without conflicts and leaves in one piece;
# finish_kernel.py undoes the order.
BY_THREAD = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]], [], 128
    )
)


class Tiles(NamedTuple):
    """What is in shared memory. q and rows come in two buffers, by parity; dout in C.DOUT_STAGES."""

    k: Any
    v: Any
    q: Any
    dout: Any
    rows: Any  # lse in base 2, and delta
    ds: Any
    dq: Any
    k_full: Any
    v_full: Any
    q_full: Any
    dout_full: Any


# What warpgroups need before and after their loops, and would otherwise keep in registers.
KEY = gl.constexpr(0)  # the program's first
ROOM = gl.constexpr(1)  # keys from there to the end of the sequence
IN_USE = gl.constexpr(2)  # likewise, of those in use
N_QUERIES = gl.constexpr(3)
OFFSET = gl.constexpr(4)  # of the band
SEQUENCE = gl.constexpr(5)
HEAD = gl.constexpr(6)
MARK = gl.constexpr(7)
SLOPE = gl.constexpr(8)  # where alibi has that of the group's first head
BEGIN = gl.constexpr(9)  # the first tile of queries
CUT = gl.constexpr(10)  # 0, and how many tiles later whole ones begin, whole ones end, and all end
DQ_AT = gl.constexpr(14)  # where the first tile of dQ lies
DQ_STEP = gl.constexpr(15)  # to the same tile of the next head, less the tiles of this one
FIELDS = gl.constexpr(16)


class Sources(NamedTuple):
    """Where tiles come from."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any


class Targets(NamedTuple):
    """Where gradients go, and the marks of tiles that came out spoiled."""

    dq: Any
    dk: Any
    dv: Any
    marks: Any


@gluon.jit
def load(shared, board, sources, rule, lengths, tiles, kv_heads, q_tiles, mark_tiles, C: gl.constexpr):
    """Fetch keys and values, then one tile of queries after the other, of one head of the group after the other."""
    program = gl.program_id(0)
    sequence = program // tiles // kv_heads
    head = program // tiles % kv_heads
    at = measure(lengths, rule.offset, sequence)
    key = program % tiles * C.KEYS
    mbarrier.expect(shared.k_full, sources.k.block_type.nbytes)
    tma.async_copy_global_to_shared(sources.k, [sequence, head, key, 0], shared.k_full, shared.k)
    begin, end = post(board, sequence, head, key, at, rule, lengths, kv_heads, q_tiles, mark_tiles, C)
    mbarrier.expect(shared.v_full, sources.v.block_type.nbytes)  # after the board, for which it speaks too
    tma.async_copy_global_to_shared(sources.v, [sequence, head, key, 0], shared.v_full, shared.v)
    t = gl.to_tensor(0)
    for h in range(head * C.GROUP, head * C.GROUP + C.GROUP):
        row = begin * C.BLOCK_Q
        for _ in range(begin, end):
            half = t & 1
            slot = t % C.DOUT_STAGES
            q_full = shared.q_full.index(half)
            dout_full = shared.dout_full.index(slot)
            if t >= 2:
                sync(Q_FREE + half, ALL)
            mbarrier.expect(q_full, sources.q.block_type.nbytes + sources.rows.block_type.nbytes)
            tma.async_copy_global_to_shared(sources.q, [sequence, h, row, 0], q_full, shared.q.index(half))
            tma.async_copy_global_to_shared(sources.rows, [0, sequence, h, row], q_full, shared.rows.index(half))
            if t >= C.DOUT_STAGES:
                sync(DO_FREE + slot, ALL)
            mbarrier.expect(dout_full, sources.dout.block_type.nbytes)
            tma.async_copy_global_to_shared(sources.dout, [sequence, h, row, 0], dout_full, shared.dout.index(slot))
            t += 1
            row += C.BLOCK_Q
    # Meet all arrivals. Where scores are made LATE, the last tile waits for one more, which nobody reads.
    if t >= 2:
        sync(Q_FREE + (t & 1), ALL)
    if C.LATE:
        mbarrier.arrive(shared.q_full.index(t & 1), count=1)
    if t >= C.DOUT_STAGES:
        sync(DO_FREE + t % C.DOUT_STAGES, ALL)
    if C.LATE and C.DOUT_STAGES == 1:
        mbarrier.arrive(shared.dout_full.index(0), count=1)
    if t >= 1:
        sync(Q_FREE + ((t + 1) & 1), ALL)
        if C.DOUT_STAGES == 2:
            sync(DO_FREE + ((t + 1) & 1), ALL)


@gluon.jit
def post(board, sequence, head, key, at, rule, lengths, kv_heads, q_tiles, mark_tiles, C: gl.constexpr):
    """Write what warpgroups have to know; the first and the last tile of queries that see these keys."""
    # The band with the roles swapped says which.
    last = gl.maximum(gl.minimum(key + C.KEYS, at.k_len), key + 1)
    n_q = at.q_len * (key < at.k_len).to(gl.int32)
    begin, full_begin, full_end, end = cuts(reach(rule.right), reach(rule.left), -at.offset, key, last, n_q, C.BLOCK_Q)
    if lengths.kv is not None:  # keys that are not in use: no tile is whole
        full_begin = gl.where(key + C.KEYS > at.k_len, end, full_begin)
        full_end = gl.maximum(full_begin, full_end)
    put(board, KEY, key)
    put(board, ROOM, at.k_room - key)
    put(board, IN_USE, at.k_len - key)
    put(board, N_QUERIES, at.q_len)
    put(board, OFFSET, at.offset)
    put(board, SEQUENCE, sequence)
    put(board, HEAD, head)
    put(board, SLOPE, sequence * rule.alibi_sequence + head * C.GROUP * rule.alibi_head)
    put(board, BEGIN, begin)
    put(board, CUT, 0)
    put(board, CUT + 1, full_begin - begin)
    put(board, CUT + 2, full_end - begin)
    put(board, CUT + 3, end - begin)
    column = sequence * kv_heads + head
    put(board, MARK, column * mark_tiles + key // KEYS)
    dq_tile = column * C.GROUP * q_tiles * (C.BLOCK_D // 64) + begin * C.DQ_TILES
    put(board, DQ_AT, dq_tile * 16)
    put(board, DQ_STEP, q_tiles * (C.BLOCK_D // 64) * 16 - (end - begin) * C.DQ_TILES * 16)
    gl.thread_barrier()  # the lane that speaks next speaks for all of them
    return begin, end


@gluon.jit
def shaped(s, t, h, board, rule, ME: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Scores of a tile as the softmax takes them, and softcap's slope.

    What is known of the keys is read from the board where it is needed: few tiles are cut, and registers are scarce.
    """
    slope = slope_of(s, rule)
    if MASKED or rule.alibi is not None:
        in_rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        seen = seen_by(board, rule, h, in_rows, ME)
        i0 = (t - h * get(board, CUT + 3) + get(board, BEGIN)) * C.BLOCK_Q
        s = shape_scores(s, rule, seen, i0)
        if MASKED:
            s = hide(s, seen, i0, True)
    else:
        s = shape_scores(s, rule, None, 0)
    return s, slope


@gluon.jit
def seen_by(board, rule, h, LAYOUT: gl.constexpr, ME: gl.constexpr):
    """The queries that see each key: from `first` to `last`; none where a key is not in use."""
    o_j = ME * KEYS + gl.arange(0, KEYS, LAYOUT)
    in_use = o_j < get(board, IN_USE)
    o_j += get(board, KEY) - get(board, OFFSET)
    last = o_j * 0 + (get(board, N_QUERIES) - 1)
    if rule.left is not None:
        last = gl.minimum(o_j + reach(rule.left), last)
    first = o_j * 0
    if rule.right is not None:
        first = o_j - reach(rule.right)
    at = 0
    slope = 0.0
    if rule.alibi is not None:
        at = o_j - plain(rule.alibi_offset)
        slope = o_j * 0.0 + gl.load(rule.alibi + get(board, SLOPE) + h * rule.alibi_head).to(gl.float32)
    return Seen(gl.where(in_use, last, -1), first, at, slope, 1.0)


@gluon.jit
def add_to_dq(dq, buffer, desc, at):
    """Have the copy engine add a 64 x 64 tile to dQ. The buffer is free."""
    buffer._reinterpret(gl.float32, [64, 64], BY_THREAD).store(dq)
    fence_async_shared()
    gl.thread_barrier()
    reduce_add(desc, [at, 0], buffer)


@gluon.jit
def put(board, FIELD: gl.constexpr, x):
    board.index(FIELD).store(gl.full([1], x, gl.int32, LANES))


@gluon.jit
def get(board, FIELD: gl.constexpr):
    return board.index(FIELD).load(ONE_EACH).item()
