"""The backward kernel for Hopper: a program owns 128 keys, and walks the queries that see them.

One warp fetches Q, dO and the statistics of rows; two warpgroups of 64 keys each hold K, V, dK and dV. For each tile of
queries a warpgroup makes, transposed, S = Q K^T, P (eq. 9), dP = dO V^T (eq. 11) and dS (eq. 12), adds P^T dO to dV
(eq. 10) and dS^T Q to dK (eq. 14), with P and dS in registers. Then dS of both goes through shared memory, each makes
half of dQ = dS K (eq. 13), and the copy engine adds it to dQ in memory: in float32, in no fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.gluon.assembly import arrive, reduce_add, sync
from flashtile.backends.gluon.softmax import Seen, hide, shape_scores, slope_of, unit_of
from flashtile.backends.gluon.tasks import LANES, ONE_EACH
from flashtile.backends.triton.blocks import locate, measure, number
from flashtile.backends.triton.cuts import cuts, reach

KEYS = gl.constexpr(64)  # of a warpgroup
WARPGROUPS = gl.constexpr(256)  # threads
ALL = gl.constexpr(288)  # and the warp that loads
# Named barriers. "dS is there": one for each warpgroup and parity, so that an arrival for the next tile never completes
# the barrier of this one.
DS_READY = gl.constexpr(5)
TOGETHER = gl.constexpr(9)
Q_FREE = gl.constexpr(10)
DO_FREE = gl.constexpr(12)
# A 64 x 64 tile of dQ lies as 128 threads hold it, so that it is stored without conflicts and leaves in one piece;
# finish_kernel.py undoes the order.
BY_THREAD = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]], [], 128
    )
)


class Tiles(NamedTuple):
    """What is in shared memory. q, dout and rows come in two buffers, by parity."""

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
SEQUENCE = gl.constexpr(5)  # as descriptors count: 0 where sequences are packed
HEAD = gl.constexpr(6)
ROW = gl.constexpr(7)  # of the first key, where the tensor begins being 0
MARK = gl.constexpr(8)
SLOPE = gl.constexpr(9)  # where alibi has that of the group's first head
BEGIN = gl.constexpr(10)  # the first tile of queries
CUT = gl.constexpr(11)  # 0, and how many tiles later whole ones begin, whole ones end, and all end
DQ_AT = gl.constexpr(15)  # where the first tile of dQ lies
DQ_STEP = gl.constexpr(16)  # to the same tile of the next head, less the tiles of this one
FIELDS = gl.constexpr(17)


class Sources(NamedTuple):
    """Where tiles come from."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any


class Targets(NamedTuple):
    """Where gradients go; dk and dv also by hand, where packed sequences end within a tile."""

    dq_desc: Any
    dk_desc: Any
    dv_desc: Any
    dk: Any
    dv: Any
    marks: Any


@gluon.jit
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    rows_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    dk,
    dv,
    marks,
    rule,
    lengths,
    tiles,
    kv_heads,
    q_tiles,
    mark_tiles,
    C: gl.constexpr,
):
    """The grid counts tiles of keys, then key heads, then sequences. q_tiles: of 64 rows, of one head, in dQ.

    A tile that has no keys, as packed sequences make some, sees no queries and stores nothing.
    """
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k = gl.allocate_shared_memory(dtype, [1, 1, 2 * KEYS, C.BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 2 * KEYS, C.BLOCK_D], v_desc.layout)
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, C.BLOCK_Q, C.BLOCK_D], q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [2, 1, 1, C.BLOCK_Q, C.BLOCK_D], dout_desc.layout)
    rows = gl.allocate_shared_memory(gl.float32, [2, 2, 1, 1, C.BLOCK_Q], rows_desc.layout)
    ds = gl.allocate_shared_memory(
        dtype, [2, 2 * KEYS, C.BLOCK_Q], gl.NVMMASharedLayout.get_default_for([2 * KEYS, C.BLOCK_Q], dtype)
    )
    dq = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    board = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    dout_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for n in gl.static_range(2):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(dout_full.index(n), count=1)
    shared = Tiles(k, v, q, dout, rows, ds, dq, k_full, v_full, q_full, dout_full)
    sources = Sources(q_desc, k_desc, v_desc, dout_desc, rows_desc)
    targets = Targets(dq_desc, dk_desc, dv_desc, dk, dv, marks)
    gl.warp_specialize(
        [
            (consume, (shared, board, targets, rule, lengths.cu_q, 0, C)),
            (consume, (shared, board, targets, rule, lengths.cu_q, 1, C)),
            (load, (shared, board, sources, rule, lengths, tiles, kv_heads, q_tiles, mark_tiles, C)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def load(shared, board, sources, rule, lengths, tiles, kv_heads, q_tiles, mark_tiles, C: gl.constexpr):
    """Fetch keys and values, then one tile of queries after the other, of one head of the group after the other."""
    program = gl.program_id(0)
    head = program // tiles % kv_heads
    sequence, tile = locate(lengths.cu_k, program % tiles, program // tiles // kv_heads, lengths.sequences, 2 * KEYS)
    at = measure(lengths, rule.offset, sequence)
    key = tile * 2 * KEYS
    place = 0 if lengths.cu_q is not None else sequence  # as descriptors count sequences
    mbarrier.expect(shared.k_full, sources.k.block_type.nbytes)
    tma.async_copy_global_to_shared(sources.k, [place, head, at.k_start + key, 0], shared.k_full, shared.k)
    begin, end = post(board, sequence, place, head, key, at, rule, lengths, kv_heads, q_tiles, mark_tiles, C)
    mbarrier.expect(shared.v_full, sources.v.block_type.nbytes)  # after the board, for which it speaks too
    tma.async_copy_global_to_shared(sources.v, [place, head, at.k_start + key, 0], shared.v_full, shared.v)
    t = gl.to_tensor(0)
    for h in range(head * C.GROUP, head * C.GROUP + C.GROUP):
        row = at.q_start + begin * C.BLOCK_Q
        for _ in range(begin, end):
            half = t & 1
            q_full = shared.q_full.index(half)
            dout_full = shared.dout_full.index(half)
            if t >= 2:
                sync(Q_FREE + half, ALL)
            mbarrier.expect(q_full, sources.q.block_type.nbytes + sources.rows.block_type.nbytes)
            tma.async_copy_global_to_shared(sources.q, [place, h, row, 0], q_full, shared.q.index(half))
            tma.async_copy_global_to_shared(sources.rows, [0, place, h, row], q_full, shared.rows.index(half))
            if t >= 2:
                sync(DO_FREE + half, ALL)
            mbarrier.expect(dout_full, sources.dout.block_type.nbytes)
            tma.async_copy_global_to_shared(sources.dout, [place, h, row, 0], dout_full, shared.dout.index(half))
            t += 1
            row += C.BLOCK_Q
    half = t & 1
    if t >= 2:
        sync(Q_FREE + half, ALL)
        sync(DO_FREE + half, ALL)
    if C.LATE:  # the last tile waits for one more, whose scores nobody reads
        mbarrier.arrive(shared.q_full.index(half), count=1)
    if t >= 1:
        sync(Q_FREE + (half ^ 1), ALL)
        sync(DO_FREE + (half ^ 1), ALL)


@gluon.jit
def post(board, sequence, place, head, key, at, rule, lengths, kv_heads, q_tiles, mark_tiles, C: gl.constexpr):
    """Write what warpgroups have to know; the first and the last tile of queries that see these keys."""
    # The band with the roles swapped says which.
    last = gl.maximum(gl.minimum(key + 2 * KEYS, at.k_len), key + 1)
    n_q = at.q_len * (key < at.k_len).to(gl.int32)
    begin, full_begin, full_end, end = cuts(reach(rule.right), reach(rule.left), -at.offset, key, last, n_q, C.BLOCK_Q)
    if lengths.cu_q is not None or lengths.kv is not None:  # keys that are not in use: no tile is whole
        full_begin = gl.where(key + 2 * KEYS > at.k_len, end, full_begin)
        full_end = gl.maximum(full_begin, full_end)
    put(board, KEY, key)
    put(board, ROOM, at.k_room - key)
    put(board, IN_USE, at.k_len - key)
    put(board, N_QUERIES, at.q_len)
    put(board, OFFSET, at.offset)
    put(board, SEQUENCE, place)
    put(board, HEAD, head)
    put(board, ROW, at.k_start + key)
    put(board, SLOPE, sequence * rule.alibi_sequence + head * C.GROUP * rule.alibi_head)
    put(board, BEGIN, begin)
    put(board, CUT, 0)
    put(board, CUT + 1, full_begin - begin)
    put(board, CUT + 2, full_end - begin)
    put(board, CUT + 3, end - begin)
    mark = key // KEYS
    dq_tile = 0
    if lengths.cu_q is not None:
        mark += at.k_start // KEYS + sequence
        dq_tile = (at.q_start // C.BLOCK_Q + sequence) * (C.BLOCK_Q // 64)
    column = place * kv_heads + head
    put(board, MARK, column * mark_tiles + mark)
    dq_tile = (column * C.GROUP * q_tiles + dq_tile) * (C.BLOCK_D // 64) + 2 * begin
    put(board, DQ_AT, dq_tile * 16)
    put(board, DQ_STEP, q_tiles * (C.BLOCK_D // 64) * 16 - (end - begin) * 32)
    gl.thread_barrier()  # the lane that speaks next speaks for all of them
    return begin, end


@gluon.jit
def queries(shared, half, C: gl.constexpr):
    return shared.q.index(half).reshape([C.BLOCK_Q, C.BLOCK_D])


@gluon.jit
def keys(tile, C: gl.constexpr):
    return tile.reshape([2 * KEYS, C.BLOCK_D])


@gluon.jit
def mine(tile, ME: gl.constexpr, C: gl.constexpr):
    return keys(tile, C).slice(ME * KEYS, KEYS, 0)


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
def step(
    t, h, s, dk, dv, shared, board, rule, unit, dq_desc, dq_at, ME: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr
):
    """Tile t of queries, of head h of the group. s: its scores already, where LATE. dq_at: where tile 0 of dQ lies."""
    dtype: gl.constexpr = shared.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_Q, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    half = t & 1
    phase = (t >> 1) & 1
    q = queries(shared, half, C)
    dout = shared.dout.index(half).reshape([C.BLOCK_Q, C.BLOCK_D])
    zero = gl.zeros([KEYS, C.BLOCK_Q], gl.float32, s_layout)
    if not C.LATE:
        mbarrier.wait(shared.q_full.index(half), phase)
        s_later = warpgroup_mma(mine(shared.k, ME, C), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.dout_full.index(half), phase)
    dp_later = warpgroup_mma(mine(shared.v, ME, C), dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not C.LATE:
        s = warpgroup_mma_wait(1, deps=(s_later,))
    s, slope = shaped(s, t, h, board, rule, ME, MASKED, C)
    rows = shared.rows.index(half).reshape([2, C.BLOCK_Q])
    p = gl.exp2(s * unit - rows.slice(0, 1, 0).load(s_layout))
    p_operand = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
    dp = warpgroup_mma_wait(0, deps=(dp_later,))
    ds = p * (dp - rows.slice(1, 1, 0).load(s_layout))
    if rule.softcap is not None:
        ds = ds * slope
    ds = ds.to(dtype)
    both = shared.ds.index(half)
    both.slice(ME * KEYS, KEYS, 0).store(ds)
    fence_async_shared()
    if not C.LATE:
        arrive(DS_READY + 2 * ME + half, WARPGROUPS)
    dv_later = warpgroup_mma(p_operand, dout, dv, is_async=True)
    ds_operand = gl.convert_layout(ds, a_layout, assert_trivial=True)
    tma.store_wait(0)  # the tile of dQ before this one has left its buffer
    if not C.LATE:
        sync(DS_READY + 2 * (1 - ME) + half, WARPGROUPS)
    else:
        sync(TOGETHER, WARPGROUPS)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([64, 64], gl.float32, dq_layout)
    if C.BLOCK_Q == 128:  # half of the rows each
        a = both.slice(ME * 64, 64, 1).permute((1, 0))
        dq_later = warpgroup_mma(a, keys(shared.k, C), nothing, use_acc=False, is_async=True)
    else:  # half of the columns each
        b = keys(shared.k, C).slice(ME * 64, 64, 1)
        dq_later = warpgroup_mma(both.permute((1, 0)), b, nothing, use_acc=False, is_async=True)
    dk_later = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dv, dq, p_operand = warpgroup_mma_wait(1, deps=(dv_later, dq_later, p_operand))
    arrive(DO_FREE + half, ALL)
    buffer = shared.dq.index(ME)
    buffer._reinterpret(gl.float32, [64, 64], BY_THREAD).store(dq)
    fence_async_shared()
    gl.thread_barrier()
    reduce_add(dq_desc, [dq_at + 32 * t, 0], buffer)
    if C.LATE:  # scores of the next tile, behind dK; registers of dQ are free by now
        mbarrier.wait(shared.q_full.index(half ^ 1), ((t + 1) >> 1) & 1)
        after = queries(shared, half ^ 1, C).permute((1, 0))
        s_later = warpgroup_mma(mine(shared.k, ME, C), after, zero, use_acc=False, is_async=True)
        dk, ds_operand = warpgroup_mma_wait(1, deps=(dk_later, ds_operand))
        s = warpgroup_mma_wait(0, deps=(s_later,))
    else:
        dk, ds_operand = warpgroup_mma_wait(0, deps=(dk_later, ds_operand))
        s = zero
    arrive(Q_FREE + half, ALL)
    return s, dk, dv


@gluon.jit
def consume(shared, board, targets, rule, cu_q, ME: gl.constexpr, C: gl.constexpr):
    """One warpgroup: 64 keys, from the first product to the stored gradients."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_Q, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    dtype: gl.constexpr = shared.k.dtype
    dk = gl.zeros([KEYS, C.BLOCK_D], gl.float32, layout)
    dv = gl.zeros([KEYS, C.BLOCK_D], gl.float32, layout)
    s = gl.zeros([KEYS, C.BLOCK_Q], gl.float32, s_layout)
    unit = unit_of(rule)
    mbarrier.wait(shared.v_full, 0)
    if get(board, ROOM) > ME * KEYS:
        gl.store(targets.marks + get(board, MARK) + ME, 0)
    mbarrier.wait(shared.k_full, 0)
    if C.LATE:
        mbarrier.wait(shared.q_full.index(0), 0)
        after = queries(shared, 0, C).permute((1, 0))
        s_later = warpgroup_mma(mine(shared.k, ME, C), after, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s_later,))
    first = gl.to_tensor(0)
    dq_at = get(board, DQ_AT) + ME * 16
    for h in range(C.GROUP):
        for n in gl.static_range(C.ALWAYS_CUT):
            s, dk, dv = step(first + n, h, s, dk, dv, shared, board, rule, unit, targets.dq_desc, dq_at, ME, True, C)
        for n in gl.static_range(0 if C.CUT_AT_BEGIN else 1, 3 if C.CUT_AT_END else 2):
            for t in range(first + get(board, CUT + n), first + get(board, CUT + n + 1)):
                s, dk, dv = step(t, h, s, dk, dv, shared, board, rule, unit, targets.dq_desc, dq_at, ME, n != 1, C)
        first += get(board, CUT + 3)
        dq_at += get(board, DQ_STEP)
    sync(TOGETHER, WARPGROUPS)
    dk = dk * number(rule.scale, gl.float32)
    flaw = gl.sum((dk + dv) * 0.0, 1)  # 0, or NaN where a gradient is not finite
    mine(shared.v, ME, C).store(dv.to(dtype))
    mine(shared.k, ME, C).store(dk.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    room = get(board, ROOM) - ME * KEYS
    whole = room > 0
    if cu_q is not None:  # the next sequence begins where this one ends
        whole = room >= KEYS
    row = get(board, ROW) + ME * KEYS
    head = get(board, HEAD)
    if whole:
        at = [get(board, SEQUENCE), head, row, 0]
        tma.async_copy_shared_to_global(targets.dv_desc, at, shared.v.slice(ME * KEYS, KEYS, 2))
        tma.async_copy_shared_to_global(targets.dk_desc, at, shared.k.slice(ME * KEYS, KEYS, 2))
    o_j = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    if cu_q is not None:
        there = (o_j < room) & (room < KEYS)
        store_rows(targets.dk, dk.to(dtype), head, row + o_j, there, C)
        store_rows(targets.dv, dv.to(dtype), head, row + o_j, there, C)
    mark = targets.marks + (o_j * 0 + get(board, MARK) + ME)
    gl.store(mark, o_j * 0 + 1, mask=(o_j < room) & (flaw != 0))
    tma.store_wait(0)


@gluon.jit
def store_rows(x, block, head, o_r, there, C: gl.constexpr):
    """Rows of a packed tensor, without the copy engine."""
    o_d = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, block.type.layout))
    p = x.ptr + head.to(gl.int64) * x.head + o_r.to(gl.int64) * x.row
    gl.store(p[:, None] + o_d[None, :], block, mask=there[:, None] & (o_d < C.DIM)[None, :])


@gluon.jit
def seen_by(board, rule, h, LAYOUT: gl.constexpr, ME: gl.constexpr):
    """The queries that see each key: from `first` to `last`; none where a key is not in use."""
    o_j = ME * KEYS + gl.arange(0, KEYS, LAYOUT)
    in_use = o_j < get(board, IN_USE)
    o_j += get(board, KEY) - get(board, OFFSET)
    last = o_j * 0 + (get(board, N_QUERIES) - 1)
    if rule.left is not None:
        last = gl.minimum(o_j + rule.left, last)
    first = o_j * 0
    if rule.right is not None:
        first = o_j - rule.right
    at = 0
    slope = 0.0
    if rule.alibi is not None:
        at = o_j - rule.alibi_offset
        slope = o_j * 0.0 + gl.load(rule.alibi + get(board, SLOPE) + h * rule.alibi_head).to(gl.float32)
    return Seen(gl.where(in_use, last, -1), first, at, slope)


@gluon.jit
def put(board, FIELD: gl.constexpr, x):
    board.index(FIELD).store(gl.full([1], x, gl.int32, LANES))


@gluon.jit
def get(board, FIELD: gl.constexpr):
    return gl.sum(board.index(FIELD).load(ONE_EACH), 0)
