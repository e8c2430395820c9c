"""Storing dQ: warps that do nothing else add its tiles to a float32 sum in memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashtile.backends.gluon.backward_producer import KV_FREE, WITH_WRITERS
from flashtile.backends.gluon.backward_scheduler import (
    CUT_END,
    DQ_AT,
    HEAD,
    SEQUENCE,
    STATE,
    TURN,
    load_at,
    read_field,
    task_descriptor,
    tile_slot,
)
from flashtile.backends.gluon.compatibility import add_tile, reinterpreted, thread_barrier
from flashtile.backends.gluon.ptx import arrive, await_adds, fence_async_global
from flashtile.backends.gpu.pdl import await_count

# A 64 x 64 tile of dQ or P is laid out as 128 threads hold it, so that it is stored without bank conflicts and dQ
# leaves in one piece; row_kernels.py undoes the order.
BY_THREAD = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]], [], 128
    )
)


@gluon.jit
def await_buffer(shared, t, PART: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Wait, before hand_over_dq(), until its buffer is free."""
    n = t * C.PARTS + PART
    mbarrier.wait(shared.dq_free.index(buffer_of(n, WG, C)), (n // C.DQ_BUFFERS + 1) & 1)


@gluon.jit
def hand_over_dq(dq, shared, t, PART: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Hand a 64 x 64 tile of dQ over to accumulate_dq(): one of C.PARTS of this warpgroup's share of query tile t."""
    store_dq_tile(dq, shared, t, PART, WG, C)
    signal_dq_tile(shared, t, PART, WG, C)


@gluon.jit
def store_dq_tile(dq, shared, t, PART: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The first half of hand_over_dq(). Other work may come between the two: stores take a while to become visible."""
    buffer = shared.dq.index(buffer_of(t * C.PARTS + PART, WG, C))
    reinterpreted(buffer, gl.float32, [64, 64], BY_THREAD).store(dq)


@gluon.jit
def signal_dq_tile(shared, t, PART: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The second half of hand_over_dq(): tell accumulate_dq() that the tile is in its buffer."""
    buffer = buffer_of(t * C.PARTS + PART, WG, C)
    fence_async_shared()
    mbarrier.arrive(shared.dq_full.index(buffer), count=1)


@gluon.jit
def buffer_of(n, WG: gl.constexpr, C: gl.constexpr):
    """The buffer of a warpgroup's n-th tile of dQ."""
    return WG * C.DQ_BUFFERS + n % C.DQ_BUFFERS


@gluon.jit
def accumulate_dq(shared, mailbox, dq, turns, complete, kv_heads, WG: gl.constexpr, C: gl.constexpr):
    """The role of one warp: have the copy engine add a warpgroup's tiles to dQ, while the warpgroup goes on.

    With turns, tiles are added in a fixed order, so that sums have the same bits each time: a task's turn at a tile of
    queries comes when all tasks before it have added theirs (turn_of()), tracked by a counter.
    """
    mbarrier.wait(shared.v_full, 0)  # then the descriptor is there too
    t = gl.to_tensor(0)
    if C.PERSISTENT:
        n = gl.to_tensor(0)
        while read_field(task_descriptor(mailbox, n), STATE) != 0:
            t = accumulate_task(t, shared, task_descriptor(mailbox, n), dq, turns, complete, kv_heads, WG, C)
            n += 1
            mbarrier.wait(shared.v_full, n & 1)
    else:
        accumulate_task(t, shared, task_descriptor(mailbox, 0), dq, turns, complete, kv_heads, WG, C)


@gluon.jit
def accumulate_task(t, shared, descriptor, dq, turns, complete, kv_heads, WG: gl.constexpr, C: gl.constexpr):
    """Add the tiles of one task. t: the number of tiles before it; returns that after it.

    complete: for each key head, the number of warps that have added all of their tiles, which finish_kernel reads.
    """
    tiles = C.GROUP * read_field(descriptor, CUT_END)
    head = read_field(descriptor, SEQUENCE) * kv_heads + read_field(descriptor, HEAD)
    if C.PERSISTENT:
        arrive(KV_FREE, WITH_WRITERS)  # this warp no longer reads the descriptor
    for _ in range(tiles):
        # No wait is needed: the warpgroup received tile t's queries (or dO), and so its fields, before it signalled the
        # last part of tile t - 1. The fields of tile 0 are posted before v_full.
        at = load_at(shared.tile_mailbox, tile_slot(t) + DQ_AT) + WG * C.PARTS * 16
        if turns is not None:  # usually its turn comes while the warpgroup still works on it
            turn = load_at(shared.tile_mailbox, tile_slot(t) + TURN)
            await_count(turns + at // 16, gl.maximum(turn, 0), 0)
            fence_async_global()
        for part in gl.static_range(C.PARTS):
            n = t * C.PARTS + part
            buffer = buffer_of(n, WG, C)
            mbarrier.wait(shared.dq_full.index(buffer), n // C.DQ_BUFFERS & 1)
            add_tile(dq, [at + part * 16, 0], shared.dq.index(buffer))
            tma.store_wait(0)
            mbarrier.arrive(shared.dq_free.index(buffer), count=1)
        if turns is not None:
            await_adds()
            thread_barrier()
            # Without the release, a few sectors of this tile were sometimes added after those of the next task.
            gl.atomic_add(turns + at // 16, (turn >= 0).to(gl.int32), sem="release")
        t += 1
    if complete is not None:
        await_adds()
        thread_barrier()
        gl.atomic_add(complete + head, 1, sem="release")
    return t


@gluon.jit
def await_all_buffers(shared, t, WG: gl.constexpr, C: gl.constexpr):
    """Wait until all buffers of a warpgroup are free: all tiles before tile t have been read from them."""
    for n in gl.static_range(C.DQ_BUFFERS):
        await_buffer(shared, t, n, WG, C)
