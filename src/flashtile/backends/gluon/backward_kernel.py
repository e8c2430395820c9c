"""The backward kernel for Hopper: a program takes 128 keys (64 over head dim 128) and the queries that see them.

One warp fetches Q, dO and the statistics of rows. Two warpgroups hold K, V, dK and dV; backward_up_to_128.py and
backward_over_128.py describe their work. Two more warps have the copy engine add dQ to a float32 sum in memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashtile.backends.gluon.backward_consumer import Targets
from flashtile.backends.gluon.backward_over_128 import process_64_keys
from flashtile.backends.gluon.backward_producer import Sources, Tiles, load
from flashtile.backends.gluon.backward_scheduler import (
    FIELDS,
    KEYS_LEFT,
    STATE,
    TILE_FIELDS,
    TILE_SLOTS,
    WARPGROUP_KEYS,
    Work,
    read_field,
    task_descriptor,
)
from flashtile.backends.gluon.backward_up_to_128 import process_128_keys
from flashtile.backends.gluon.compatibility import reinterpreted
from flashtile.backends.gluon.dq import BY_THREAD, accumulate_dq
from flashtile.backends.gpu.pdl import launch_dependents, wait_for_previous


@gluon.jit(do_not_specialize=["tiles", "kv_heads", "section", "padded", "flag_tiles", "tasks"])
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
    flags,
    counter,
    turns,
    complete,
    rule,
    lengths,
    tiles,
    kv_heads,
    section,
    padded,
    flag_tiles,
    tasks,
    C: gl.constexpr,
):
    """counter: two counters, 0 at launch and reset to 0 at exit. padded: rows of a head in dQ.

    tasks: key tiles of all heads.
    """
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    OVER_128: gl.constexpr = not C.PERSISTENT
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, C.KEYS, C.BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 1, C.KEYS, C.BLOCK_D], v_desc.layout)
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, C.BLOCK_Q, C.BLOCK_D], q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [C.DOUT_STAGES, 1, 1, C.BLOCK_Q, C.BLOCK_D], dout_desc.layout)
    rows = gl.allocate_shared_memory(gl.float32, [2, 2, 1, 1, C.BLOCK_Q], rows_desc.layout)
    tile_mailbox = gl.allocate_shared_memory(gl.int32, [TILE_SLOTS * TILE_FIELDS, 1], numbers)
    p = None
    if OVER_128:
        p = gl.allocate_shared_memory(gl.float32, [WARPGROUP_KEYS, C.BLOCK_Q], BY_THREAD)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.KEYS, C.BLOCK_Q], dtype)
    ds = gl.allocate_shared_memory(dtype, [1 if OVER_128 else 2, C.KEYS, C.BLOCK_Q], ds_layout)
    out = None
    if OVER_128:
        dq = gl.allocate_shared_memory(gl.float32, [2 * C.DQ_BUFFERS, 16, 256], dq_desc.layout)
    else:  # dK and dV leave by the same memory, swizzled
        out = gl.allocate_shared_memory(dtype, [C.OUT_TILES, 1, 1, WARPGROUP_KEYS, C.BLOCK_D], dv_desc.layout)
        dq = reinterpreted(out, gl.float32, [2 * C.DQ_BUFFERS, 16, 256], dq_desc.layout)
    mailbox = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], numbers)
    k_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    dout_full = gl.allocate_shared_memory(gl.int64, [C.DOUT_STAGES, 1], barrier)
    dq_full = gl.allocate_shared_memory(gl.int64, [2 * C.DQ_BUFFERS, 1], barrier)
    dq_free = gl.allocate_shared_memory(gl.int64, [2 * C.DQ_BUFFERS, 1], barrier)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for n in gl.static_range(2 * C.DQ_BUFFERS):
        mbarrier.init(dq_full.index(n), count=1)
        mbarrier.init(dq_free.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(q_full.index(n), count=1)
    for n in gl.static_range(C.DOUT_STAGES):
        mbarrier.init(dout_full.index(n), count=1)
    wait_for_previous(True)
    launch_dependents(True)
    shared = Tiles(
        k, v, q, dout, rows, tile_mailbox, p, ds, dq, out, k_full, v_full, q_full, dout_full, dq_full, dq_free
    )
    sources = Sources(q_desc, k_desc, v_desc, dout_desc, rows_desc)
    targets = Targets(dk_desc, dv_desc, dk, dv, flags)
    work = Work(rule, lengths, tiles, kv_heads, section, padded, flag_tiles, tasks)
    gl.warp_specialize(
        [
            (consume, (shared, mailbox, targets, rule, 0, C)),
            (consume, (shared, mailbox, targets, rule, 1, C)),
            (load, (shared, mailbox, sources, counter, turns, work, C)),
            (accumulate_dq, (shared, mailbox, dq_desc, turns, complete, kv_heads, 0, C)),
            (accumulate_dq, (shared, mailbox, dq_desc, turns, complete, kv_heads, 1, C)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )


@gluon.jit
def consume(shared, mailbox, targets, rule, WG: gl.constexpr, C: gl.constexpr):
    """The role of one warpgroup."""
    mbarrier.wait(shared.v_full, 0)  # then the descriptor is there too
    if C.PERSISTENT:
        t = gl.to_tensor(0)
        n = gl.to_tensor(0)
        while read_field(task_descriptor(mailbox, n), STATE) != 0:
            mbarrier.wait(shared.k_full, n & 1)
            t = process_128_keys(t, shared, task_descriptor(mailbox, n), targets, rule, WG, C)
            n += 1
            mbarrier.wait(shared.v_full, n & 1)
        tma.store_wait(0)
    else:
        mbarrier.wait(shared.k_full, 0)
        descriptor = task_descriptor(mailbox, 0)
        if not C.PACKED or C.ALWAYS_CUT == 0:
            process_64_keys(shared, descriptor, targets, rule, WG, C)
        else:  # programs beyond the tiles of keys have no diagonal
            for _ in range(gl.minimum(read_field(descriptor, KEYS_LEFT), 1)):
                process_64_keys(shared, descriptor, targets, rule, WG, C)
