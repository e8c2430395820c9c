"""The backward pass for head dims up to 128: each of two warpgroups has 64 keys, with all their columns.

For each tile of queries a warpgroup computes, transposed, S = Q K^T, P (eq. 9), dP = dO V^T (eq. 11) and dS (eq. 12),
and adds P^T dO to dV (eq. 10) and dS^T Q to dK (eq. 14), with P and dS in registers. Both exchange dS through shared
memory, and each computes half of dQ = dS K (eq. 13), one tile later. So one may be half a tile ahead of the other, and
issues products while the other computes exponentials.
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
from flashtile.backends.gluon.backward_producer import (
    DO_FREE,
    KV_FREE,
    Q_FREE,
    WARPGROUPS,
    WARPGROUPS_MEET,
    WITH_LOADER,
    WITH_WRITERS,
)
from flashtile.backends.gluon.backward_scheduler import FLAG, IN_USE, KEYS_LEFT, WARPGROUP_KEYS, read_field
from flashtile.backends.gluon.compatibility import thread_barrier
from flashtile.backends.gluon.dq import await_all_buffers, await_buffer, signal_dq_tile, store_dq_tile
from flashtile.backends.gluon.ptx import arrive, hold, sync
from flashtile.backends.gluon.softmax import unit_of

# Named barriers. DS_READY: a warpgroup has stored its dS of this tile, and has read that of the tile before. There is
# one for each warpgroup and parity, so that an arrival for the next tile never completes the barrier of this one.
DS_READY = gl.constexpr(5)
HEAD_START = gl.constexpr(14)  # the first warpgroup has computed its first dS


@gluon.jit
def queries(shared, half, C: gl.constexpr):
    return shared.q.index(half).reshape([C.BLOCK_Q, C.BLOCK_D])


@gluon.jit
def keys(tile, C: gl.constexpr):
    return tile.reshape([2 * WARPGROUP_KEYS, C.BLOCK_D])


@gluon.jit
def own_keys(tile, WG: gl.constexpr, C: gl.constexpr):
    return keys(tile, C).slice(WG * WARPGROUP_KEYS, WARPGROUP_KEYS, 0)


@gluon.jit
def rematerialized(tiles, t, FIRST: gl.constexpr = 0):
    """tiles[FIRST], with an address that seems to depend on t, so that it is recomputed for each tile.

    Kept in registers, it would be spilled, or displace others.
    """
    return tiles.index(FIRST + (t >> 30))


@gluon.jit
def begin_dp(v_tile, dout, zero, WG: gl.constexpr, C: gl.constexpr):
    """Issue this warpgroup's dP, with its keys as rows."""
    return warpgroup_mma(own_keys(v_tile, WG, C), dout.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def begin_dq(t, k_tile, shared, WG: gl.constexpr, C: gl.constexpr):
    """Issue this warpgroup's half of dQ of tile t, from dS of both warpgroups."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([64, 64], gl.float32, layout)
    ds = shared.ds.index(t & 1)
    k = keys(k_tile, C)
    if C.BLOCK_Q == 128:  # half of the rows
        ds = ds.slice(WG * 64, 64, 1)
    else:  # half of the columns
        k = k.slice(WG * 64, 64, 1)
    return warpgroup_mma(ds.permute((1, 0)), k, nothing, use_acc=False, is_async=True)


@gluon.jit
def buffer_dq(dq, t, shared, WG: gl.constexpr, C: gl.constexpr):
    """Store dQ of tile t in its buffer; signal_dq_tile() then notifies the warp that adds it to memory."""
    await_buffer(shared, t, 0, WG, C)
    store_dq_tile(dq, shared, t, 0, WG, C)


@gluon.jit
def step(
    t,
    s,
    dk,
    dv,
    shared,
    descriptor,
    rule,
    unit,
    WG: gl.constexpr,
    MASKED: gl.constexpr,
    C: gl.constexpr,
    FIRST: gl.constexpr = False,
):
    """Process query tile t, and dQ of the tile before it unless it is the FIRST of a task. s: the scores of tile t."""
    dtype: gl.constexpr = shared.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_Q, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    HELD: gl.constexpr = not C.SCORES_FIRST
    CROWDED: gl.constexpr = rule.softcap is not None and C.BLOCK_Q == 128  # no registers for dP beside softcap's chain
    half = t & 1
    k_tile = rematerialized(shared.k, t)
    v_tile = rematerialized(shared.v, t)
    q = queries(shared, half, C)
    dout = shared.dout.index(half).reshape([C.BLOCK_Q, C.BLOCK_D])
    zero = gl.zeros([WARPGROUP_KEYS, C.BLOCK_Q], gl.float32, s_layout)
    mbarrier.wait(shared.dout_full.index(half), (t >> 1) & 1)
    if FIRST and WG == 1:
        sync(HEAD_START, WARPGROUPS)
    if not CROWDED:
        dp_later = begin_dp(v_tile, dout, zero, WG, C)
    s, slope = shaped(s, t, shared, descriptor, rule, WG, MASKED)
    rows = shared.rows.index(half).reshape([2, C.BLOCK_Q])
    p = gl.exp2(s * unit - rows.slice(0, 1, 0).load(s_layout))
    weights = p.to(dtype)
    if rule.softcap is not None:
        p = p * slope  # now, so that one number is kept instead of two
    p_operand = gl.convert_layout(weights, a_layout, assert_trivial=True)
    if CROWDED:
        dp_later = begin_dp(v_tile, dout, zero, WG, C)
    if HELD:
        delta = rows.slice(1, 1, 0).load(s_layout)
        hold(weights)
        dp = warpgroup_mma_wait(0, deps=(dp_later,))
    else:
        dp = warpgroup_mma_wait(0, deps=(dp_later,))
        delta = rows.slice(1, 1, 0).load(s_layout)
    ds = (p * (dp - delta)).to(dtype)
    if FIRST and WG == 0:
        arrive(HEAD_START, WARPGROUPS)
    sync(DS_READY + 2 * (1 - WG) + (half ^ 1), WARPGROUPS)
    shared.ds.index(half).slice(WG * WARPGROUP_KEYS, WARPGROUP_KEYS, 0).store(ds)
    if C.SCORES_FIRST:
        fence_async_shared()
    dv_later = warpgroup_mma(p_operand, dout, dv, is_async=True)
    ds_operand = gl.convert_layout(ds, a_layout, assert_trivial=True)
    if not FIRST:
        dq_later = begin_dq(t - 1, k_tile, shared, WG, C)
    dk_later = warpgroup_mma(ds_operand, q, dk, is_async=True)
    if not C.SCORES_FIRST:
        fence_async_shared()
    if FIRST:
        dv, p_operand = warpgroup_mma_wait(1, deps=(dv_later, p_operand))
    else:
        dv, dq, p_operand = warpgroup_mma_wait(1, deps=(dv_later, dq_later, p_operand))
    arrive(DS_READY + 2 * WG + half, WARPGROUPS)
    arrive(DO_FREE + half, WITH_LOADER)
    if not FIRST and not C.SCORES_FIRST:
        buffer_dq(dq, t - 1, shared, WG, C)
    # The scores of the next tile, issued after dK.
    mbarrier.wait(shared.q_full.index(half ^ 1), ((t + 1) >> 1) & 1)
    after = queries(shared, half ^ 1, C).permute((1, 0))
    s_later = warpgroup_mma(own_keys(k_tile, WG, C), after, zero, use_acc=False, is_async=True)
    if not FIRST and C.SCORES_FIRST:
        buffer_dq(dq, t - 1, shared, WG, C)
        signal_dq_tile(shared, t - 1, 0, WG, C)
    dk, ds_operand = warpgroup_mma_wait(1, deps=(dk_later, ds_operand))
    arrive(Q_FREE + half, WITH_LOADER)
    if not FIRST and not C.SCORES_FIRST:
        signal_dq_tile(shared, t - 1, 0, WG, C)
    s = warpgroup_mma_wait(0, deps=(s_later,))
    return s, dk, dv


@gluon.jit
def process_128_keys(t, shared, descriptor, targets, rule, WG: gl.constexpr, C: gl.constexpr):
    """The work of one warpgroup on its 64 keys of a task. t: the number of query tiles before it; returns the next."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_Q, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    dtype: gl.constexpr = shared.q.dtype
    if read_field(descriptor, KEYS_LEFT) > WG * WARPGROUP_KEYS:
        gl.store(targets.flags + read_field(descriptor, FLAG) + WG, 0)
    if C.ENDS:
        in_use = read_field(descriptor, IN_USE)
        if in_use < 2 * WARPGROUP_KEYS:
            clear_unused(own_keys(shared.k.index(0), WG, C), in_use - WG * WARPGROUP_KEYS)
            clear_unused(own_keys(shared.v.index(0), WG, C), in_use - WG * WARPGROUP_KEYS)
            fence_async_shared()
            sync(WARPGROUPS_MEET, WARPGROUPS)
    dk = gl.zeros([WARPGROUP_KEYS, C.BLOCK_D], gl.float32, layout)
    dv = gl.zeros([WARPGROUP_KEYS, C.BLOCK_D], gl.float32, layout)
    s = gl.zeros([WARPGROUP_KEYS, C.BLOCK_Q], gl.float32, s_layout)
    mbarrier.wait(shared.q_full.index(t & 1), (t >> 1) & 1)
    first = queries(shared, t & 1, C).permute((1, 0))
    s_later = warpgroup_mma(own_keys(rematerialized(shared.k, t), WG, C), first, s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s_later,))
    tma.store_wait(0)  # the gradients of the previous task left by the buffers of dQ
    thread_barrier()
    unit = unit_of(rule, 1.0)
    CUT_SOMEWHERE: gl.constexpr = C.ALWAYS_CUT > 0 or C.CUT_AT_BEGIN or C.CUT_AT_END
    arrive(DS_READY + 2 * WG + ((t + 1) & 1), WARPGROUPS)  # there is no dS of a previous tile to read
    s, dk, dv = step(t, s, dk, dv, shared, descriptor, rule, unit, WG, CUT_SOMEWHERE, C, True)
    t, dk, dv = walk(step, t + 1, s, dk, dv, shared, descriptor, rule, unit, WG, C, 1)
    dk, dv, flaw = finish(dk, dv, dtype, read_ends(descriptor, WG * WARPGROUP_KEYS), rule, C)
    sync(DS_READY + 2 * (1 - WG) + ((t + 1) & 1), WARPGROUPS)
    dq = warpgroup_mma_wait(0, deps=(begin_dq(t - 1, rematerialized(shared.k, t), shared, WG, C),))
    arrive(KV_FREE, WITH_WRITERS)
    buffer_dq(dq, t - 1, shared, WG, C)
    signal_dq_tile(shared, t - 1, 0, WG, C)
    await_all_buffers(shared, t, WG, C)
    v_out = rematerialized(shared.out, t, WG * (C.OUT_TILES // 2))
    k_out = rematerialized(shared.out, t, WG * (C.OUT_TILES // 2) + 1)
    thread_barrier()
    v_out.reshape([WARPGROUP_KEYS, C.BLOCK_D]).store(dv)
    k_out.reshape([WARPGROUP_KEYS, C.BLOCK_D]).store(dk)
    fence_async_shared()
    thread_barrier()
    # read_ends() each time: kept in registers its fields would be spilled, even if they were read only once.
    store_gradient(targets.dv_desc, targets.dv, dv, v_out, read_ends(descriptor, WG * WARPGROUP_KEYS), 0, C.DIM_V, C)
    store_gradient(targets.dk_desc, targets.dk, dk, k_out, read_ends(descriptor, WG * WARPGROUP_KEYS), 0, C.DIM, C)
    set_flag(targets, flaw, read_ends(descriptor, WG * WARPGROUP_KEYS))
    return t
