"""The loading warp of the backward pass, the layout of shared memory, and the named barriers."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.backends.gluon.backward_scheduler import (
    DQ_AT,
    QUERY,
    SLOPE,
    STATE,
    TURN,
    next_key_tile,
    post_task,
    query_tiles,
    store_at,
    task_descriptor,
    tile_slot,
    turn_of,
    write_field,
)
from flashtile.backends.gluon.compatibility import fetch_tile, thread_barrier
from flashtile.backends.gluon.forward_scheduler import retire
from flashtile.backends.gluon.ptx import sync

# Threads of a named barrier.
WARPGROUPS = gl.constexpr(256)
WITH_LOADER = gl.constexpr(288)  # and the loading warp
WITH_WRITERS = gl.constexpr(352)  # and the warps that write dQ: all that read or write the mailbox
# Named barriers; the backward kernels have more of their own.
KV_FREE = gl.constexpr(9)
Q_FREE = gl.constexpr(10)
DO_FREE = gl.constexpr(12)
WARPGROUPS_MEET = gl.constexpr(15)


class Tiles(NamedTuple):
    """What is in shared memory. q and rows have two buffers, dout has C.DOUT_STAGES, tile_mailbox TILE_SLOTS slots.

    dq has C.DQ_BUFFERS per warpgroup, which other warps write to memory.
    """

    k: Any
    v: Any
    q: Any
    dout: Any
    rows: Any  # lse in base 2, and delta
    tile_mailbox: Any  # TILE_FIELDS numbers for each tile of queries
    p: Any  # float32, if one warpgroup computes P for both; else None
    ds: Any
    dq: Any
    out: Any  # the memory of dq as buffers for dK and dV of both warpgroups; None if these leave otherwise
    k_full: Any
    v_full: Any
    q_full: Any
    dout_full: Any
    dq_full: Any
    dq_free: Any


class Sources(NamedTuple):
    """The TMA descriptors of the inputs."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any


@gluon.jit
def load(shared, mailbox, sources, counter, turns, work, C: gl.constexpr):
    """Fetch the keys and values of one task after the other, and the tiles of queries that see them.

    The first query tile comes before the keys, because warpgroups may still be using those of the task before.
    """
    lengths = work.lengths
    t = gl.to_tensor(0)
    n = gl.to_tensor(0)
    key_tile, number = next_key_tile(counter, turns, work, C)
    while number < work.tasks:
        at = key_tile.at
        key = key_tile.tile * C.KEYS
        sequence = key_tile.sequence  # the coordinate for TMA descriptors
        dq_row = 0
        if lengths.cu_q is not None:
            sequence = 0
            dq_row = (at.q_start // C.KEYS + key_tile.sequence) * C.KEYS
        begin, full_begin, full_end, end, seen = query_tiles(key, at, work, C)
        h = key_tile.head * C.GROUP
        row = begin * C.BLOCK_Q
        count = C.GROUP * (end - begin)
        for i in range(count + 1):
            if i == gl.minimum(count, 1):
                if C.PERSISTENT and n > 0:
                    sync(KV_FREE, WITH_WRITERS)
                mbarrier.expect(shared.k_full, sources.k.block_type.nbytes)
                k_at = [sequence, key_tile.head, at.k_start + key, 0]
                fetch_tile(sources.k, k_at, shared.k_full, shared.k.index(0))
                cut = (begin, full_begin, full_end, end)
                post_task(task_descriptor(mailbox, n), key_tile, sequence, key, cut, seen, work)
                # After the descriptor: this barrier announces it too.
                mbarrier.expect(shared.v_full, sources.v.block_type.nbytes)
                fetch_tile(sources.v, k_at, shared.v_full, shared.v.index(0))
            if i < count:
                q_at = [sequence, h, at.q_start + row, 0]
                if C.DOUT_STAGES == 2:
                    fetch_dout(shared, sources, q_at, t, C)
                # Everything else precedes the wait for a free buffer: warpgroups wait the longest for these queries.
                slot = tile_slot(t)
                dq_head = (sequence * work.kv_heads * C.GROUP + h) * work.padded + dq_row
                store_at(shared.tile_mailbox, slot + QUERY, row)
                store_at(shared.tile_mailbox, slot + DQ_AT, (dq_head + row) // 64 * (C.BLOCK_D // 64) * 16)
                store_at(
                    shared.tile_mailbox,
                    slot + SLOPE,
                    key_tile.sequence * work.rule.alibi_sequence + h * work.rule.alibi_head,
                )
                if turns is not None:
                    turn = turn_of(key_tile, row, work, C)
                    store_at(shared.tile_mailbox, slot + TURN, turn * seen + seen - 1)
                thread_barrier()  # one lane then continues for the whole warp
                fetch_queries(shared, sources, q_at, [0, sequence, h, dq_row + row], t)
                if C.DOUT_STAGES == 1:
                    fetch_dout(shared, sources, q_at, t, C)
                t += 1
                row += C.BLOCK_Q
                if row == end * C.BLOCK_Q:
                    row = begin * C.BLOCK_Q
                    h += 1
        n += 1
        if C.PERSISTENT:
            key_tile, number = next_key_tile(counter, turns, work, C)
        else:
            number = work.tasks
    # Match all arrivals. The last tile waits for one more tile, whose scores are not used.
    if t >= 2:
        sync(Q_FREE + (t & 1), WITH_LOADER)
    mbarrier.arrive(shared.q_full.index(t & 1), count=1)
    if t >= C.DOUT_STAGES:
        sync(DO_FREE + t % C.DOUT_STAGES, WITH_LOADER)
    if C.DOUT_STAGES == 1:
        mbarrier.arrive(shared.dout_full.index(0), count=1)
    if t >= 1:
        sync(Q_FREE + ((t + 1) & 1), WITH_LOADER)
        if C.DOUT_STAGES == 2:
            sync(DO_FREE + ((t + 1) & 1), WITH_LOADER)
    if C.PERSISTENT:
        if n > 0:
            sync(KV_FREE, WITH_WRITERS)
        write_field(task_descriptor(mailbox, n), STATE, 0)
        thread_barrier()
        mbarrier.arrive(shared.v_full, count=1)
    retire(counter)


@gluon.jit
def fetch_queries(shared, sources, at, rows_at, t):
    """Fetch Q of tile t and the statistics of its rows, once the buffer is free."""
    half = t & 1
    full = shared.q_full.index(half)
    if t >= 2:
        sync(Q_FREE + half, WITH_LOADER)
    mbarrier.expect(full, sources.q.block_type.nbytes + sources.rows.block_type.nbytes)
    fetch_tile(sources.q, at, full, shared.q.index(half))
    fetch_tile(sources.rows, rows_at, full, shared.rows.index(half))


@gluon.jit
def fetch_dout(shared, sources, at, t, C: gl.constexpr):
    """Fetch dO of tile t. With two buffers, one is free sooner than that of the queries, and is filled first."""
    slot = t % C.DOUT_STAGES
    full = shared.dout_full.index(slot)
    if t >= C.DOUT_STAGES:
        sync(DO_FREE + slot, WITH_LOADER)
    mbarrier.expect(full, sources.dout.block_type.nbytes)
    fetch_tile(sources.dout, at, full, shared.dout.index(slot))
