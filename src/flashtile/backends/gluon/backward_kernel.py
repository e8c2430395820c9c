"""The backward kernel for Hopper: a program owns 128 keys, and walks the queries that see them.

One warp fetches Q, dO and the statistics of rows; two warpgroups of 64 keys each hold K, V, dK and dV. For each tile of
queries a warpgroup makes, transposed, S = Q K^T, P (eq. 9), dP = dO V^T (eq. 11) and dS (eq. 12), adds P^T dO to dV
(eq. 10) and dS^T Q to dK (eq. 14), with P and dS in registers. Then dS of both goes through shared memory, each makes
half of dQ = dS K (eq. 13), and the copy engine adds it to dQ in memory: in float32, in no fixed order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.gluon.assembly import arrive, sync
from flashtile.backends.gluon.columns import (
    ALL,
    DO_FREE,
    FIELDS,
    IN_USE,
    KEYS,
    MARK,
    ORDERS,
    Q_FREE,
    ROOM,
    TILE_FIELDS,
    TOGETHER,
    WARPGROUPS,
    Extent,
    Sources,
    Targets,
    Tiles,
    clear_unused,
    get,
    load,
    shaped,
    store_columns,
    walk,
)
from flashtile.backends.gluon.dq import add_to_dq, await_buffer, write
from flashtile.backends.triton.blocks import number

# Named barriers. "dS is there": one for each warpgroup and parity, so that an arrival for the next tile never completes
# the barrier of this one.
DS_READY = gl.constexpr(5)


@gluon.jit(do_not_specialize=["tiles", "kv_heads", "padded", "mark_tiles"])
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
    turns,
    rule,
    lengths,
    tiles,
    kv_heads,
    padded,
    mark_tiles,
    C: gl.constexpr,
):
    """The grid counts tiles of keys, then key heads, then sequences. padded: rows of a head in dQ."""
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k = gl.allocate_shared_memory(dtype, [1, 1, 2 * KEYS, C.BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 2 * KEYS, C.BLOCK_D], v_desc.layout)
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, C.BLOCK_Q, C.BLOCK_D], q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [2, 1, 1, C.BLOCK_Q, C.BLOCK_D], dout_desc.layout)
    rows = gl.allocate_shared_memory(gl.float32, [2, 2, 1, 1, C.BLOCK_Q], rows_desc.layout)
    orders = gl.allocate_shared_memory(gl.int32, [ORDERS * TILE_FIELDS, 1], numbers)
    ds = gl.allocate_shared_memory(
        dtype, [2, 2 * KEYS, C.BLOCK_Q], gl.NVMMASharedLayout.get_default_for([2 * KEYS, C.BLOCK_Q], dtype)
    )
    dq = gl.allocate_shared_memory(gl.float32, [2 * C.DQ_BUFFERS, 16, 256], dq_desc.layout)
    board = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], numbers)
    k_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    dout_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    dq_full = gl.allocate_shared_memory(gl.int64, [2 * C.DQ_BUFFERS, 1], barrier)
    dq_free = gl.allocate_shared_memory(gl.int64, [2 * C.DQ_BUFFERS, 1], barrier)
    for n in gl.static_range(2 * C.DQ_BUFFERS):
        mbarrier.init(dq_full.index(n), count=1)
        mbarrier.init(dq_free.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(dout_full.index(n), count=1)
    shared = Tiles(k, v, q, dout, rows, orders, None, ds, dq, k_full, v_full, q_full, dout_full, dq_full, dq_free)
    sources = Sources(q_desc, k_desc, v_desc, dout_desc, rows_desc)
    targets = Targets(dq_desc, dk_desc, dv_desc, dk, dv, marks)
    work = Extent(rule, lengths, tiles, kv_heads, padded, mark_tiles)
    if C.WRITERS:
        gl.warp_specialize(
            [
                (consume, (shared, board, targets, rule, 0, C)),
                (consume, (shared, board, targets, rule, 1, C)),
                (load, (shared, board, sources, turns, work, C)),
                (write, (shared, board, dq_desc, turns, 0, C)),
                (write, (shared, board, dq_desc, turns, 1, C)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (shared, board, targets, rule, 0, C)),
                (consume, (shared, board, targets, rule, 1, C)),
                (load, (shared, board, sources, turns, work, C)),
            ],
            [4, 1],
            [240, 24],
        )


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
def step(t, s, dk, dv, shared, board, targets, rule, unit, ME: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Tile t of queries. s: its scores already, where LATE."""
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
    s, slope = shaped(s, t, shared, board, rule, ME, MASKED, C)
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
    await_buffer(shared, t, 0, ME, C)
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
    add_to_dq(dq, shared, targets.dq, t, 0, ME, C)
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
def consume(shared, board, targets, rule, ME: gl.constexpr, C: gl.constexpr):
    """One warpgroup."""
    mbarrier.wait(shared.v_full, 0)
    mbarrier.wait(shared.k_full, 0)
    if not C.PACKED or C.ALWAYS_CUT == 0:
        own_keys(shared, board, targets, rule, ME, C)
    else:  # there may be more programs than tiles of keys, and those have no diagonal
        for _ in range(gl.minimum(get(board, ROOM), 1)):
            own_keys(shared, board, targets, rule, ME, C)


@gluon.jit
def own_keys(shared, board, targets, rule, ME: gl.constexpr, C: gl.constexpr):
    """One warpgroup: 64 keys, from the first product to the stored gradients."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_Q, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    dtype: gl.constexpr = shared.k.dtype
    if get(board, ROOM) > ME * KEYS:
        gl.store(targets.marks + get(board, MARK) + ME, 0)
    if C.ENDS:
        in_use = get(board, IN_USE)
        if in_use < 2 * KEYS:
            clear_unused(mine(shared.k, ME, C), KEYS, in_use - ME * KEYS)
            clear_unused(mine(shared.v, ME, C), KEYS, in_use - ME * KEYS)
            fence_async_shared()
            sync(TOGETHER, WARPGROUPS)
    dk = gl.zeros([KEYS, C.BLOCK_D], gl.float32, layout)
    dv = gl.zeros([KEYS, C.BLOCK_D], gl.float32, layout)
    s = gl.zeros([KEYS, C.BLOCK_Q], gl.float32, s_layout)
    if C.LATE:
        mbarrier.wait(shared.q_full.index(0), 0)
        after = queries(shared, 0, C).permute((1, 0))
        s_later = warpgroup_mma(mine(shared.k, ME, C), after, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s_later,))
    dk, dv = walk(step, s, dk, dv, shared, board, targets, rule, ME, C)
    sync(TOGETHER, WARPGROUPS)  # nobody reads K any more
    dk = dk * number(rule.scale, gl.float32)
    o_j = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    if C.ENDS:
        used = (o_j < get(board, IN_USE) - ME * KEYS)[:, None]
        dk = gl.where(used, dk, 0.0)
        dv = gl.where(used, dv, 0.0)
    flaw = gl.sum((dk + dv) * 0.0, 1)  # 0, or NaN where a gradient is not finite
    dk = dk.to(dtype)
    dv = dv.to(dtype)
    mine(shared.v, ME, C).store(dv)
    mine(shared.k, ME, C).store(dk)
    fence_async_shared()
    gl.thread_barrier()
    row: gl.constexpr = ME * KEYS
    store_columns(targets.dv_desc, targets.dv, dv, shared.v.slice(row, KEYS, 2), row, board, 0, C.DIM_V, C)
    store_columns(targets.dk_desc, targets.dk, dk, shared.k.slice(row, KEYS, 2), row, board, 0, C.DIM, C)
    mark = targets.marks + (o_j * 0 + get(board, MARK) + ME)
    gl.store(mark, o_j * 0 + 1, mask=(o_j < get(board, ROOM) - row) & (flaw != 0))
    tma.store_wait(0)
