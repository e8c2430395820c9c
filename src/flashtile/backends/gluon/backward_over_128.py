"""The backward pass for head dims over 128: two warpgroups share the work on 64 keys.

Registers do not hold dK and dV of so many columns. Here the first warpgroup computes S and P of a tile, the second dP
and dS, all transposed. They exchange P and dS through shared memory, and each has half of the columns of dK, dV and dQ.
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
    finish,
    read_ends,
    set_flag,
    shaped,
    store_gradient,
    walk,
)
from flashtile.backends.gluon.backward_producer import DO_FREE, Q_FREE, WARPGROUPS, WARPGROUPS_MEET, WITH_LOADER
from flashtile.backends.gluon.backward_scheduler import FLAG, IN_USE, KEYS_LEFT, WARPGROUP_KEYS, read_field
from flashtile.backends.gluon.compatibility import reinterpreted, thread_barrier
from flashtile.backends.gluon.dq import await_buffer, hand_over_dq
from flashtile.backends.gluon.ptx import arrive, sync
from flashtile.backends.gluon.softmax import unit_of

# Named barriers.
P_READY = gl.constexpr(5)
DS_READY = gl.constexpr(6)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def flat(tile, C: gl.constexpr):
    return tile.reshape([64, C.BLOCK_D])


@gluon.jit
def begin_first_product(shared, t, WG: gl.constexpr, C: gl.constexpr):
    """Issue the first product of tile t: S in the first warpgroup, dP in the second."""
    zero = gl.zeros([WARPGROUP_KEYS, 64], gl.float32, S_LAYOUT)
    if WG == 0:
        mbarrier.wait(shared.q_full.index(t & 1), (t >> 1) & 1)
        a = flat(shared.k.index(0), C)
        b = flat(shared.q.index(t & 1), C)
    else:
        mbarrier.wait(shared.dout_full.index(0), t & 1)
        a = flat(shared.v.index(0), C)
        b = flat(shared.dout.index(0), C)
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def step(t, s, dk, dv, shared, descriptor, rule, unit, WG: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Process tile t of queries. s: its S or dP."""
    dtype: gl.constexpr = shared.q.dtype
    HALF: gl.constexpr = C.BLOCK_D // 2
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([64, 64], gl.float32, dq_layout)
    half = t & 1
    q = flat(shared.q.index(half), C).slice(WG * HALF, HALF, 1)
    dout = flat(shared.dout.index(0), C).slice(WG * HALF, HALF, 1)
    k = flat(shared.k.index(0), C)
    rows = shared.rows.index(half).reshape([2, 64])
    ds_shared = shared.ds.index(0)
    if WG == 0:
        s, _slope = shaped(s, t, shared, descriptor, rule, 0, MASKED)
        p = gl.exp2(s * unit - rows.slice(0, 1, 0).load(S_LAYOUT))
        shared.p.store(p)
        arrive(P_READY, WARPGROUPS)
        p_operand = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
        mbarrier.wait(shared.dout_full.index(0), t & 1)
        dv_later = warpgroup_mma(p_operand, dout, dv, is_async=True)
        await_buffer(shared, t, 0, WG, C)
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
        await_buffer(shared, t, 0, WG, C)
        ds_operand = gl.convert_layout(ds, a_layout, assert_trivial=True)
        first = k.slice(HALF, 64, 1)
        dq_later = warpgroup_mma(ds_shared.permute((1, 0)), first, nothing, use_acc=False, is_async=True)
        dk_later = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dv, dq, p_operand = warpgroup_mma_wait(1, deps=(dv_later, dq_later, p_operand))
    arrive(DO_FREE, WITH_LOADER)
    hand_over_dq(dq, shared, t, 0, WG, C)
    second = k.slice(WG * HALF + 64, 64, 1)
    dq_later = warpgroup_mma(ds_shared.permute((1, 0)), second, nothing, use_acc=False, is_async=True)
    if WG == 0:
        dk = warpgroup_mma_wait(1, deps=(dk_later,))
    else:
        dk, ds_operand = warpgroup_mma_wait(1, deps=(dk_later, ds_operand))
    arrive(Q_FREE + half, WITH_LOADER)
    s_later = begin_first_product(shared, t + 1, WG, C)
    dq = warpgroup_mma_wait(1, deps=(dq_later,))
    await_buffer(shared, t, 1, WG, C)
    hand_over_dq(dq, shared, t, 1, WG, C)
    s = warpgroup_mma_wait(0, deps=(s_later,))
    return s, dk, dv


@gluon.jit
def process_64_keys(shared, descriptor, targets, rule, WG: gl.constexpr, C: gl.constexpr):
    """The work of one warpgroup: half of the columns of 64 keys."""
    HALF: gl.constexpr = C.BLOCK_D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dtype: gl.constexpr = shared.k.dtype
    mine = (read_field(descriptor, KEYS_LEFT) > 0) & (WG == 0)
    if mine:
        gl.store(targets.flags + read_field(descriptor, FLAG), 0)
    # Keys beyond the last one are 0 already, but with this branch ptxas spills nothing in the loop.
    in_use = read_field(descriptor, IN_USE)
    if in_use < WARPGROUP_KEYS:
        clear_unused(flat(shared.k.index(0), C).slice(WG * HALF, HALF, 1), in_use)
        clear_unused(flat(shared.v.index(0), C).slice(WG * HALF, HALF, 1), in_use)
        fence_async_shared()
        sync(WARPGROUPS_MEET, WARPGROUPS)
    dk = gl.zeros([WARPGROUP_KEYS, HALF], gl.float32, layout)
    dv = gl.zeros([WARPGROUP_KEYS, HALF], gl.float32, layout)
    s = warpgroup_mma_wait(0, deps=(begin_first_product(shared, gl.to_tensor(0), WG, C),))
    _t, dk, dv = walk(step, gl.to_tensor(0), s, dk, dv, shared, descriptor, rule, unit_of(rule, 1.0), WG, C)
    sync(WARPGROUPS_MEET, WARPGROUPS)  # no query is read any more
    ends = read_ends(descriptor, 0)
    dk, dv, flaw = finish(dk, dv, dtype, ends, rule, C)
    v_out = reinterpreted(shared.dout.index(0), dtype, [2, 1, 1, WARPGROUP_KEYS, HALF], targets.dv_desc.layout).index(
        WG
    )
    k_out = reinterpreted(shared.q.index(0), dtype, [2, 1, 1, WARPGROUP_KEYS, HALF], targets.dk_desc.layout).index(WG)
    v_out.reshape([WARPGROUP_KEYS, HALF]).store(dv)
    k_out.reshape([WARPGROUP_KEYS, HALF]).store(dk)
    fence_async_shared()
    thread_barrier()
    store_gradient(targets.dv_desc, targets.dv, dv, v_out, ends, WG * HALF, C.DIM_V, C)
    store_gradient(targets.dk_desc, targets.dk, dk, k_out, ends, WG * HALF, C.DIM, C)
    set_flag(targets, flaw, ends)
    tma.store_wait(0)
