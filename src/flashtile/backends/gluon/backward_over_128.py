"""The backward pass for head dims over 128: two warpgroups share the work on 64 keys.

Registers do not hold dK and dV of so many columns. Here the first warpgroup makes S and P of a tile, the second dP and
dS, all transposed; they hand P and dS to each other through shared memory, and each owns half of the columns of dK, dV
and dQ.
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

from flashtile.backends.gluon.backward_consumer import (
    clear_unused,
    finished,
    mark_spoiled,
    read_ends,
    shaped,
    store_columns,
    walk,
)
from flashtile.backends.gluon.backward_producer import ALL, DO_FREE, Q_FREE, TOGETHER, WARPGROUPS
from flashtile.backends.gluon.backward_scheduler import IN_USE, KEYS, MARK, ROOM, told
from flashtile.backends.gluon.compatibility import reinterpreted, thread_barrier
from flashtile.backends.gluon.dq import add_to_dq, await_buffer
from flashtile.backends.gluon.ptx import arrive, sync
from flashtile.backends.gluon.softmax import unit_of

P_READY = gl.constexpr(5)  # named barriers
DS_READY = gl.constexpr(6)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def whole(tile, C: gl.constexpr):
    return tile.reshape([64, C.BLOCK_D])


@gluon.jit
def make_first(shared, t, ME: gl.constexpr, C: gl.constexpr):
    """Begin the product that a warpgroup needs first of tile t: S of the first one, dP of the second."""
    zero = gl.zeros([KEYS, 64], gl.float32, S_LAYOUT)
    if ME == 0:
        mbarrier.wait(shared.q_full.index(t & 1), (t >> 1) & 1)
        a = whole(shared.k.index(0), C)
        b = whole(shared.q.index(t & 1), C)
    else:
        mbarrier.wait(shared.dout_full.index(0), t & 1)
        a = whole(shared.v.index(0), C)
        b = whole(shared.dout.index(0), C)
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def step(t, s, dk, dv, shared, board, rule, unit, ME: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Tile t of queries. s: its S or dP already."""
    dtype: gl.constexpr = shared.q.dtype
    HALF: gl.constexpr = C.BLOCK_D // 2
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([64, 64], gl.float32, dq_layout)
    half = t & 1
    q = whole(shared.q.index(half), C).slice(ME * HALF, HALF, 1)
    dout = whole(shared.dout.index(0), C).slice(ME * HALF, HALF, 1)
    k = whole(shared.k.index(0), C)
    rows = shared.rows.index(half).reshape([2, 64])
    ds_shared = shared.ds.index(0)
    if ME == 0:
        s, _slope = shaped(s, t, shared, board, rule, 0, MASKED)
        p = gl.exp2(s * unit - rows.slice(0, 1, 0).load(S_LAYOUT))
        shared.p.store(p)
        arrive(P_READY, WARPGROUPS)
        p_operand = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
        mbarrier.wait(shared.dout_full.index(0), t & 1)
        dv_later = warpgroup_mma(p_operand, dout, dv, is_async=True)
        await_buffer(shared, t, 0, ME, C)
        sync(DS_READY, WARPGROUPS)
        first = k.slice(0, 64, 1)
        dq_later = warpgroup_mma(ds_shared.permute((1, 0)), first, nothing, use_acc=False, is_async=True)
        dk_later = warpgroup_mma(ds_shared, q, dk, is_async=True)
    else:
        mbarrier.wait(shared.q_full.index(half), (t >> 1) & 1)
        sync(P_READY, WARPGROUPS)
        p = shared.p.load(S_LAYOUT)
        ds = (p * (s - rows.slice(1, 1, 0).load(S_LAYOUT))).to(dtype)
        p_operand = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
        ds_shared.store(ds)
        fence_async_shared()
        arrive(DS_READY, WARPGROUPS)
        dv_later = warpgroup_mma(p_operand, dout, dv, is_async=True)
        await_buffer(shared, t, 0, ME, C)
        ds_operand = gl.convert_layout(ds, a_layout, assert_trivial=True)
        first = k.slice(HALF, 64, 1)
        dq_later = warpgroup_mma(ds_shared.permute((1, 0)), first, nothing, use_acc=False, is_async=True)
        dk_later = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dv, dq, p_operand = warpgroup_mma_wait(1, deps=(dv_later, dq_later, p_operand))
    arrive(DO_FREE, ALL)
    add_to_dq(dq, shared, t, 0, ME, C)
    second = k.slice(ME * HALF + 64, 64, 1)
    dq_later = warpgroup_mma(ds_shared.permute((1, 0)), second, nothing, use_acc=False, is_async=True)
    if ME == 0:
        dk = warpgroup_mma_wait(1, deps=(dk_later,))
    else:
        dk, ds_operand = warpgroup_mma_wait(1, deps=(dk_later, ds_operand))
    arrive(Q_FREE + half, ALL)
    s_later = make_first(shared, t + 1, ME, C)
    dq = warpgroup_mma_wait(1, deps=(dq_later,))
    await_buffer(shared, t, 1, ME, C)
    add_to_dq(dq, shared, t, 1, ME, C)
    s = warpgroup_mma_wait(0, deps=(s_later,))
    return s, dk, dv


@gluon.jit
def own_64_keys(shared, board, targets, rule, ME: gl.constexpr, C: gl.constexpr):
    """One warpgroup: half of the columns of 64 keys."""
    HALF: gl.constexpr = C.BLOCK_D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dtype: gl.constexpr = shared.k.dtype
    mine = (told(board, ROOM) > 0) & (ME == 0)
    if mine:
        gl.store(targets.marks + told(board, MARK), 0)
    # Keys beyond the last one are 0 already; but with this branch there, ptxas spills nothing in the loop.
    in_use = told(board, IN_USE)
    if in_use < KEYS:
        clear_unused(whole(shared.k.index(0), C).slice(ME * HALF, HALF, 1), in_use)
        clear_unused(whole(shared.v.index(0), C).slice(ME * HALF, HALF, 1), in_use)
        fence_async_shared()
        sync(TOGETHER, WARPGROUPS)
    dk = gl.zeros([KEYS, HALF], gl.float32, layout)
    dv = gl.zeros([KEYS, HALF], gl.float32, layout)
    s = warpgroup_mma_wait(0, deps=(make_first(shared, gl.to_tensor(0), ME, C),))
    _t, dk, dv = walk(step, gl.to_tensor(0), s, dk, dv, shared, board, rule, unit_of(rule, 1.0), ME, C)
    sync(TOGETHER, WARPGROUPS)  # nobody reads queries any more
    ends = read_ends(board, 0)
    dk, dv, flaw = finished(dk, dv, dtype, ends, rule, C)
    v_out = reinterpreted(shared.dout.index(0), dtype, [2, 1, 1, KEYS, HALF], targets.dv_desc.layout).index(ME)
    k_out = reinterpreted(shared.q.index(0), dtype, [2, 1, 1, KEYS, HALF], targets.dk_desc.layout).index(ME)
    v_out.reshape([KEYS, HALF]).store(dv)
    k_out.reshape([KEYS, HALF]).store(dk)
    fence_async_shared()
    thread_barrier()
    store_columns(targets.dv_desc, targets.dv, dv, v_out, ends, ME * HALF, C.DIM_V, C)
    store_columns(targets.dk_desc, targets.dk, dk, k_out, ends, ME * HALF, C.DIM, C)
    mark_spoiled(targets, flaw, ends)
    tma.store_wait(0)
