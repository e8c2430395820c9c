"""The backward kernel for Hopper and head dims over 128: a program owns 64 keys, and its warpgroups share the work.

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

from flashtile.backends.gluon.assembly import arrive, sync
from flashtile.backends.gluon.columns import (
    ALL,
    CUT,
    DO_FREE,
    DQ_AT,
    DQ_STEP,
    END_OF_LOOP,
    FIELDS,
    HEAD,
    KEY,
    KEYS,
    MARK,
    Q_FREE,
    ROOM,
    SEQUENCE,
    WARPGROUPS,
    Sources,
    Targets,
    Tiles,
    add_to_dq,
    get,
    load,
    shaped,
)
from flashtile.backends.gluon.softmax import unit_of
from flashtile.backends.triton.blocks import number

P_READY = gl.constexpr(9)  # named barriers
DS_READY = gl.constexpr(14)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit(do_not_specialize=["tiles", "kv_heads", "q_tiles", "mark_tiles"])
def wide_backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    rows_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    marks,
    rule,
    lengths,
    tiles,
    kv_heads,
    q_tiles,
    mark_tiles,
    C: gl.constexpr,
):
    """The grid counts tiles of keys, then key heads, then sequences. q_tiles: of 64 rows, of one head, in dQ."""
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    k = gl.allocate_shared_memory(dtype, [1, 1, KEYS, C.BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, KEYS, C.BLOCK_D], v_desc.layout)
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, C.BLOCK_D], q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [1, 1, 1, 64, C.BLOCK_D], dout_desc.layout)
    rows = gl.allocate_shared_memory(gl.float32, [2, 2, 1, 1, 64], rows_desc.layout)
    p_ds = gl.allocate_shared_memory(dtype, [2, 64, 64], square)
    dq = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    board = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    dout_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(dout_full.index(0), count=1)
    for n in gl.static_range(2):
        mbarrier.init(q_full.index(n), count=1)
    shared = Tiles(k, v, q, dout, rows, p_ds, dq, k_full, v_full, q_full, dout_full)
    sources = Sources(q_desc, k_desc, v_desc, dout_desc, rows_desc)
    targets = Targets(dq_desc, dk_desc, dv_desc, marks)
    gl.warp_specialize(
        [
            (consume, (shared, board, targets, rule, 0, C)),
            (consume, (shared, board, targets, rule, 1, C)),
            (load, (shared, board, sources, rule, lengths, tiles, kv_heads, q_tiles, mark_tiles, C)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def whole(tile, C: gl.constexpr):
    return tile.reshape([64, C.BLOCK_D])


@gluon.jit
def make_first(shared, t, ME: gl.constexpr, C: gl.constexpr):
    """Begin the product that a warpgroup needs first of tile t: S of the first one, dP of the second."""
    zero = gl.zeros([KEYS, 64], gl.float32, S_LAYOUT)
    if ME == 0:
        mbarrier.wait(shared.q_full.index(t & 1), (t >> 1) & 1)
        a = whole(shared.k, C)
        b = whole(shared.q.index(t & 1), C)
    else:
        mbarrier.wait(shared.dout_full.index(0), t & 1)
        a = whole(shared.v, C)
        b = whole(shared.dout.index(0), C)
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def step(
    t, h, s, dk, dv, shared, board, rule, unit, dq_desc, dq_at, ME: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr
):
    """Tile t of queries, of head h of the group. s: its S or dP already. dq_at: where tile 0 of dQ lies."""
    dtype: gl.constexpr = shared.q.dtype
    HALF: gl.constexpr = C.BLOCK_D // 2
    a_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([64, 64], gl.float32, dq_layout)
    half = t & 1
    q = whole(shared.q.index(half), C).slice(ME * HALF, HALF, 1)
    dout = whole(shared.dout.index(0), C).slice(ME * HALF, HALF, 1)
    k = whole(shared.k, C)
    rows = shared.rows.index(half).reshape([2, 64])
    p_shared = shared.ds.index(0)
    ds_shared = shared.ds.index(1)
    if ME == 0:
        s, _slope = shaped(s, t, h, board, rule, 0, MASKED, C)
        p = gl.exp2(s * unit - rows.slice(0, 1, 0).load(S_LAYOUT)).to(dtype)
        p_shared.store(p)
        arrive(P_READY, WARPGROUPS)
        p_operand = gl.convert_layout(p, a_layout, assert_trivial=True)
        mbarrier.wait(shared.dout_full.index(0), t & 1)
        dv_later = warpgroup_mma(p_operand, dout, dv, is_async=True)
        tma.store_wait(0)  # the last tile of dQ has left its buffer
        sync(DS_READY, WARPGROUPS)
        first = k.slice(0, 64, 1)
        dq_later = warpgroup_mma(ds_shared.permute((1, 0)), first, nothing, use_acc=False, is_async=True)
        dk_later = warpgroup_mma(ds_shared, q, dk, is_async=True)
    else:
        mbarrier.wait(shared.q_full.index(half), (t >> 1) & 1)
        sync(P_READY, WARPGROUPS)
        p = p_shared.load(S_LAYOUT)
        p_operand = gl.convert_layout(p, a_layout, assert_trivial=True)
        dv_later = warpgroup_mma(p_operand, dout, dv, is_async=True)
        ds = (p.to(gl.float32) * (s - rows.slice(1, 1, 0).load(S_LAYOUT))).to(dtype)
        ds_shared.store(ds)
        fence_async_shared()
        arrive(DS_READY, WARPGROUPS)
        tma.store_wait(0)
        ds_operand = gl.convert_layout(ds, a_layout, assert_trivial=True)
        first = k.slice(HALF, 64, 1)
        dq_later = warpgroup_mma(ds_shared.permute((1, 0)), first, nothing, use_acc=False, is_async=True)
        dk_later = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dv, dq, p_operand = warpgroup_mma_wait(1, deps=(dv_later, dq_later, p_operand))
    arrive(DO_FREE, ALL)
    buffer = shared.dq.index(ME)
    add_to_dq(dq, buffer, dq_desc, dq_at + 64 * t)
    second = k.slice(ME * HALF + 64, 64, 1)
    dq_later = warpgroup_mma(ds_shared.permute((1, 0)), second, nothing, use_acc=False, is_async=True)
    if ME == 0:
        dk = warpgroup_mma_wait(1, deps=(dk_later,))
    else:
        dk, ds_operand = warpgroup_mma_wait(1, deps=(dk_later, ds_operand))
    arrive(Q_FREE + half, ALL)
    s_later = make_first(shared, t + 1, ME, C)
    dq = warpgroup_mma_wait(1, deps=(dq_later,))
    tma.store_wait(0)
    add_to_dq(dq, buffer, dq_desc, dq_at + 64 * t + 16)
    s = warpgroup_mma_wait(0, deps=(s_later,))
    return s, dk, dv


@gluon.jit
def consume(shared, board, targets, rule, ME: gl.constexpr, C: gl.constexpr):
    """One warpgroup: half of the columns of 64 keys."""
    HALF: gl.constexpr = C.BLOCK_D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dtype: gl.constexpr = shared.k.dtype
    dk = gl.zeros([KEYS, HALF], gl.float32, layout)
    dv = gl.zeros([KEYS, HALF], gl.float32, layout)
    unit = unit_of(rule, 1.0)
    mbarrier.wait(shared.v_full, 0)
    mine = (get(board, ROOM) > 0) & (ME == 0)
    if mine:
        gl.store(targets.marks + get(board, MARK), 0)
    mbarrier.wait(shared.k_full, 0)
    s = warpgroup_mma_wait(0, deps=(make_first(shared, gl.to_tensor(0), ME, C),))
    dq_at = get(board, DQ_AT) + ME * 32
    for h in range(C.GROUP):
        first = h * get(board, CUT + 3)
        for n in gl.static_range(C.ALWAYS_CUT):
            s, dk, dv = step(first + n, h, s, dk, dv, shared, board, rule, unit, targets.dq, dq_at, ME, True, C)
        for n in gl.static_range(0 if C.CUT_AT_BEGIN else 1, 3 if C.CUT_AT_END else 2):
            for t in range(first + get(board, CUT + n), first + get(board, CUT + n + 1)):
                s, dk, dv = step(t, h, s, dk, dv, shared, board, rule, unit, targets.dq, dq_at, ME, n != 1, C)
        dq_at += get(board, DQ_STEP)
    sync(END_OF_LOOP, WARPGROUPS)
    dk = dk * number(rule.scale, gl.float32)
    flaw = gl.sum((dk + dv) * 0.0, 1)  # 0, or NaN where a gradient is not finite
    v_out = shared.dout.index(0)._reinterpret(dtype, [2, 1, 1, KEYS, HALF], targets.dv.layout).index(ME)
    k_out = shared.q.index(0)._reinterpret(dtype, [2, 1, 1, KEYS, HALF], targets.dk.layout).index(ME)
    v_out.reshape([KEYS, HALF]).store(dv.to(dtype))
    k_out.reshape([KEYS, HALF]).store(dk.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    room = get(board, ROOM)
    inside = room > 0
    row = get(board, KEY)
    head = get(board, HEAD)
    if inside:
        at = [get(board, SEQUENCE), head, row, ME * HALF]
        tma.async_copy_shared_to_global(targets.dv, at, v_out)
        tma.async_copy_shared_to_global(targets.dk, at, k_out)
    o_j = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    gl.store(targets.marks + (o_j * 0 + get(board, MARK)), o_j * 0 + 1, mask=(o_j < room) & (flaw != 0))
    tma.store_wait(0)
