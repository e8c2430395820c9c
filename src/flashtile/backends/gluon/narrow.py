"""The backward pass for head dims up to 128: each of two warpgroups owns 64 keys, all columns of them.

For each tile of queries a warpgroup makes, transposed, S = Q K^T, P (eq. 9), dP = dO V^T (eq. 11) and dS (eq. 12), adds
P^T dO to dV (eq. 10) and dS^T Q to dK (eq. 14), with P and dS in registers. Then dS of both goes through shared memory,
and each makes half of dQ = dS K (eq. 13).
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
    IN_USE,
    KEYS,
    MARK,
    Q_FREE,
    ROOM,
    TOGETHER,
    WARPGROUPS,
    clear_unused,
    finished,
    get,
    mark_spoiled,
    shaped,
    store_columns,
    walk,
)
from flashtile.backends.gluon.dq import add_to_dq, await_buffer

# Named barriers. "dS is there": one for each warpgroup and parity, so that an arrival for the next tile never completes
# the barrier of this one.
DS_THERE = gl.constexpr(5)


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
def begin_dq(shared, k, half, ME: gl.constexpr, C: gl.constexpr):
    """Start this warpgroup's half of dQ of a tile, from dS of both."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([64, 64], gl.float32, layout)
    if C.BLOCK_Q == 128:  # half of the rows each
        a = shared.ds.index(half).slice(ME * 64, 64, 1)
        b = keys(k, C)
    else:  # half of the columns each
        a = shared.ds.index(half)
        b = keys(k, C).slice(ME * 64, 64, 1)
    return warpgroup_mma(a.permute((1, 0)), b, nothing, use_acc=False, is_async=True)


@gluon.jit
def add_before(dq, shared, desc, t, ME: gl.constexpr, C: gl.constexpr):
    """dQ of the tile before t, if there is one."""
    if t > 0:
        await_buffer(shared, t - 1, 0, ME, C)
        add_to_dq(dq, shared, desc, t - 1, 0, ME, C)


@gluon.jit
def made_anew(tile, t, C: gl.constexpr):
    """K or V. Where registers are scarce, its address looks as if t decided it: kept all along, it would be spilled."""
    if C.BLOCK_D == 128:
        return tile.index(t >> 30)
    else:
        return tile.index(0)


@gluon.jit
def step(t, s, dk, dv, shared, board, targets, rule, unit, ME: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Tile t of queries. s: its scores already, where LATE."""
    dtype: gl.constexpr = shared.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_Q, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    half = t & 1
    k_tile = made_anew(shared.k, t, C)
    v_tile = made_anew(shared.v, t, C)
    phase = (t >> 1) & 1
    q = queries(shared, half, C)
    dout = shared.dout.index(half).reshape([C.BLOCK_Q, C.BLOCK_D])
    zero = gl.zeros([KEYS, C.BLOCK_Q], gl.float32, s_layout)
    if not C.LATE:
        mbarrier.wait(shared.q_full.index(half), phase)
        s_later = warpgroup_mma(mine(k_tile, ME, C), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.dout_full.index(half), phase)
    dp_later = warpgroup_mma(mine(v_tile, ME, C), dout.permute((1, 0)), zero, use_acc=False, is_async=True)
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
    sync(DS_THERE + 2 * (1 - ME) + (half ^ 1), WARPGROUPS)
    shared.ds.index(half).slice(ME * KEYS, KEYS, 0).store(ds)
    fence_async_shared()
    dv_later = warpgroup_mma(p_operand, dout, dv, is_async=True)
    ds_operand = gl.convert_layout(ds, a_layout, assert_trivial=True)
    dq_later = begin_dq(shared, k_tile, half ^ 1, ME, C)
    dk_later = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dv, dq, p_operand = warpgroup_mma_wait(1, deps=(dv_later, dq_later, p_operand))
    arrive(DS_THERE + 2 * ME + half, WARPGROUPS)
    arrive(DO_FREE + half, ALL)
    if C.LATE:  # scores of the next tile, behind dK
        mbarrier.wait(shared.q_full.index(half ^ 1), ((t + 1) >> 1) & 1)
        after = queries(shared, half ^ 1, C).permute((1, 0))
        s_later = warpgroup_mma(mine(k_tile, ME, C), after, zero, use_acc=False, is_async=True)
        add_before(dq, shared, targets.dq, t, ME, C)
        dk, ds_operand = warpgroup_mma_wait(1, deps=(dk_later, ds_operand))
        s = warpgroup_mma_wait(0, deps=(s_later,))
    else:
        add_before(dq, shared, targets.dq, t, ME, C)
        dk, ds_operand = warpgroup_mma_wait(0, deps=(dk_later, ds_operand))
        s = zero
    arrive(Q_FREE + half, ALL)
    return s, dk, dv


@gluon.jit
def own_128_keys(shared, board, targets, rule, ME: gl.constexpr, C: gl.constexpr):
    """One warpgroup: 64 keys, from the first product to the stored gradients."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_Q, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    dtype: gl.constexpr = shared.q.dtype
    if get(board, ROOM) > ME * KEYS:
        gl.store(targets.marks + get(board, MARK) + ME, 0)
    if C.ENDS:
        in_use = get(board, IN_USE)
        if in_use < 2 * KEYS:
            clear_unused(mine(shared.k.index(0), ME, C), in_use - ME * KEYS)
            clear_unused(mine(shared.v.index(0), ME, C), in_use - ME * KEYS)
            fence_async_shared()
            sync(TOGETHER, WARPGROUPS)
    dk = gl.zeros([KEYS, C.BLOCK_D], gl.float32, layout)
    dv = gl.zeros([KEYS, C.BLOCK_D], gl.float32, layout)
    s = gl.zeros([KEYS, C.BLOCK_Q], gl.float32, s_layout)
    if C.LATE:
        mbarrier.wait(shared.q_full.index(0), 0)
        after = queries(shared, 0, C).permute((1, 0))
        s_later = warpgroup_mma(mine(shared.k.index(0), ME, C), after, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s_later,))
    arrive(DS_THERE + 2 * ME + 1, WARPGROUPS)
    t, dk, dv = walk(step, s, dk, dv, shared, board, targets, rule, ME, C)
    last = (t + 1) & 1
    sync(DS_THERE + 2 * (1 - ME) + last, WARPGROUPS)
    dq = warpgroup_mma_wait(0, deps=(begin_dq(shared, shared.k.index(0), last, ME, C),))
    add_before(dq, shared, targets.dq, t, ME, C)
    sync(TOGETHER, WARPGROUPS)  # nobody reads K any more
    row: gl.constexpr = ME * KEYS
    dk, dv, flaw = finished(dk, dv, dtype, row, board, rule, C)
    mine(shared.v.index(0), ME, C).store(dv)
    mine(shared.k.index(0), ME, C).store(dk)
    fence_async_shared()
    gl.thread_barrier()
    store_columns(targets.dv_desc, targets.dv, dv, shared.v.index(0).slice(row, KEYS, 2), row, board, 0, C.DIM_V, C)
    store_columns(targets.dk_desc, targets.dk, dk, shared.k.index(0).slice(row, KEYS, 2), row, board, 0, C.DIM, C)
    mark_spoiled(targets, flaw, row, board)
    tma.store_wait(0)
