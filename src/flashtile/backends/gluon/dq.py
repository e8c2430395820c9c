"""dQ on its way out: tiles of it are added to float32 in memory, by warps that do nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashtile.backends.gluon.assembly import arrive, await_count, pack_halves, reduce_add, written
from flashtile.backends.gluon.columns import CUT, DQ_AT, EVERYONE, GO, KV_FREE, TURN, get, order_of
from flashtile.backends.gluon.row_kernels import place_of
from flashtile.backends.triton.blocks import head_of, measure, number
from flashtile.backends.triton.cuts import cuts, reach

# A 64 x 64 tile of dQ or P lies as 128 threads hold it, so that it is stored without conflicts, and dQ leaves in one
# piece; row_kernels.py undoes the order.
BY_THREAD = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]], [], 128
    )
)


@gluon.jit
def await_buffer(shared, t, PART: gl.constexpr, ME: gl.constexpr, C: gl.constexpr):
    """Before add_to_dq(): until what was in its buffer has left it."""
    n = t * C.PARTS + PART
    mbarrier.wait(shared.dq_free.index(buffer_of(n, ME, C)), (n // C.DQ_BUFFERS + 1) & 1)


@gluon.jit
def add_to_dq(dq, shared, t, PART: gl.constexpr, ME: gl.constexpr, C: gl.constexpr):
    """Have write() add a 64 x 64 tile to dQ, one of C.PARTS of this warpgroup's share of tile t."""
    buffer = buffer_of(t * C.PARTS + PART, ME, C)
    shared.dq.index(buffer)._reinterpret(gl.float32, [64, 64], BY_THREAD).store(dq)
    fence_async_shared()
    mbarrier.arrive(shared.dq_full.index(buffer), count=1)


@gluon.jit
def buffer_of(n, ME: gl.constexpr, C: gl.constexpr):
    """The buffer of a warpgroup's n-th tile of dQ."""
    return ME * C.DQ_BUFFERS + n % C.DQ_BUFFERS


@gluon.jit
def write(shared, board, dq, counts, ME: gl.constexpr, C: gl.constexpr):
    """One warp: have the copy engine add a warpgroup's tiles to dQ, while the warpgroup goes on.

    The task of the last keys that a tile of queries sees writes its tile, and those of earlier keys add theirs. A count
    for each tile says how many have. Where the order is fixed, so that sums are the same each time, a task waits until
    all those of later keys have added theirs, else until the first has been there.
    """
    mbarrier.wait(shared.v_full, 0)  # and the board is there
    t = gl.to_tensor(0)
    if C.PERSISTENT:
        n = gl.to_tensor(0)
        while get(board, GO) != 0:
            t = write_tiles(t, shared, board, dq, counts, ME, C)
            n += 1
            mbarrier.wait(shared.v_full, n & 1)
    else:
        write_tiles(t, shared, board, dq, counts, ME, C)


@gluon.jit
def write_tiles(t, shared, board, dq, counts, ME: gl.constexpr, C: gl.constexpr):
    """Those of one task. t: tiles before; and after."""
    tiles = C.GROUP * get(board, CUT + 3)
    if C.PERSISTENT:
        arrive(KV_FREE, EVERYONE)  # it is done with the board
    at = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    before = gl.to_tensor(-1)  # a tile that may not have been added yet
    for _ in range(tiles):
        for part in gl.static_range(C.PARTS):
            n = t * C.PARTS + part
            buffer = buffer_of(n, ME, C)
            mbarrier.wait(shared.dq_full.index(buffer), n // C.DQ_BUFFERS & 1)
            if part == 0:  # orders stay as they are while a buffer is full
                at = get(shared.orders, order_of(t) + DQ_AT) + ME * C.PARTS * 16
                turn = get(shared.orders, order_of(t) + TURN)
                await_count(counts + at // 16, gl.maximum(turn if C.ORDERED else gl.minimum(turn, 1), 0))
            if turn == 0:
                tma.async_copy_shared_to_global(dq, [at + part * 16, 0], shared.dq.index(buffer))
            if turn > 0:
                reduce_add(dq, [at + part * 16, 0], shared.dq.index(buffer))
            tma.store_wait(0)
            mbarrier.arrive(shared.dq_free.index(buffer), count=1)
        if C.ORDERED or turn <= 0:  # others may wait for it
            written(0)
            count(counts, before)
            count(counts, at * (turn >= 0).to(gl.int32) - (turn < 0).to(gl.int32))
            before = gl.to_tensor(-1)
        else:
            written(C.PARTS)
            count(counts, before)
            before = at
        t += 1
    written(0)
    count(counts, before)
    return t


@gluon.jit
def count(counts, at):
    """One more task has been at a tile; -1 for none."""
    gl.thread_barrier()
    if at >= 0:
        gl.atomic_add(counts + at // 16, 1, sem="release")


class Rounding(NamedTuple):
    """dQ as tasks add it up, and where it goes: units of 64 rows, so many for each head, in the order of marks."""

    total: Any
    counts: Any
    dq: Any
    marks: Any
    units: Any
    tiles: Any
    late: Any  # units that warpgroups round when there is no task left


@gluon.jit
def finish(rounding, work, C: gl.constexpr):
    """One warp: this program's share of the units but the late ones."""
    finish_units(gl.program_id(0), rounding.units - rounding.late, gl.num_programs(0), rounding, work, C)


@gluon.jit
def finish_late(rounding, work, ME: gl.constexpr, C: gl.constexpr):
    """One warpgroup: its share of the late ones."""
    first = rounding.units - rounding.late + 2 * gl.program_id(0) + ME
    finish_units(first, rounding.units, 2 * gl.num_programs(0), rounding, work, C)


@gluon.jit
def finish_units(first, end, step, rounding, work, C: gl.constexpr):
    """Units of 64 rows of dQ, each when all tasks have added to it: in its dtype, and their marks.

    They are still in the cache then: heads come in the order in which tasks are taken.
    """
    heads = work.kv_heads * C.GROUP
    rule = work.rule
    for n in range(first, end, step):
        unit = rounding.units - 1 - n
        head = unit // rounding.tiles % heads
        sequence = unit // rounding.tiles // heads
        column = sequence * heads + head
        sequence, start, length, tile, row = place_of(work.lengths, unit % rounding.tiles, sequence, 64, C.KEYS)
        if work.lengths.cu_q is not None:
            column = head
        # As many tasks as see the tile of queries that these rows are in.
        at = measure(work.lengths, rule.offset, sequence)
        query = tile * 64 // C.BLOCK_Q * C.BLOCK_Q
        last = gl.minimum(query + C.BLOCK_Q, length)
        cut = cuts(reach(rule.left), reach(rule.right), at.offset, query, last, at.k_len, C.KEYS)
        tasks = (cut[3] - cut[0]) * (tile * 64 < length).to(gl.int32)
        rows = head_of(rounding.dq, sequence, head, start + tile * 64, length - tile * 64)
        place = (column.to(gl.int64) * work.padded + row) // 64 * (C.BLOCK_D // 64)
        flaw = gl.to_tensor(0)
        for part in range(C.BLOCK_D // 64):
            if tasks > 0:
                await_count(rounding.counts + place + part, tasks)
                source = rounding.total + (place + part) * 4096
                flaw |= finish_part(source, rows, part * 64, number(rule.scale, gl.float32), C)
            else:
                clear_part(rows, part * 64, C)
        gl.store(rounding.marks + unit, flaw)


@gluon.jit
def clear_part(rows, column, C: gl.constexpr):
    """64 x 64 of dQ that no task has added to."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_d = column + gl.arange(0, 64, gl.SliceLayout(0, layout))
    for n in range(16):
        o_r = n * 4 + gl.arange(0, 4, gl.SliceLayout(1, layout))
        there = (o_r < rows.length)[:, None] & (o_d < C.DIM)[None, :]
        nothing = gl.zeros([4, 64], rows.ptr.dtype.element_ty, layout)
        gl.store(rows.ptr + (o_r * rows.row)[:, None] + o_d[None, :], nothing, mask=there)


@gluon.jit
def finish_part(source, rows, column, scale, C: gl.constexpr):
    """64 x 64 of dQ, from `column` on; not 0 where any of it is not finite."""
    dtype: gl.constexpr = rows.ptr.dtype.element_ty
    QUADS: gl.constexpr = 64 * gl.num_warps()  # of numbers at a time
    quads: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    o_q = gl.arange(0, QUADS, gl.SliceLayout(1, quads))
    o_4 = gl.arange(0, 4, gl.SliceLayout(0, quads))
    flaw = gl.zeros([QUADS], gl.float32, gl.SliceLayout(1, quads))
    out = rows.ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    for n in range(1024 // QUADS):
        x = gl.load(source + n * QUADS * 4 + o_q[:, None] * 4 + o_4[None, :], cache_modifier=".cg") * scale
        flaw += gl.sum(x * 0.0, 1)
        low, high = gl.split(gl.reshape(x, [QUADS, 2, 2]))
        both = pack_halves(low, high, dtype)
        # Bits of the place of a quad: columns 1 and 2, rows 0 to 2, rows 4 and 5, columns 3 to 5. In it, row 3.
        layout: gl.constexpr = both.type.layout
        o = gl.arange(0, QUADS, gl.SliceLayout(1, layout)) + n * QUADS
        o_r = (o >> 2 & 7) + (o >> 5 & 3) * 16
        o_d = column + (o & 3) * 2 + (o >> 7) * 8
        o_8 = gl.arange(0, 2, gl.SliceLayout(0, layout)) * 8
        there = ((o_r[:, None] + o_8[None, :]) < rows.length) & (o_d < C.DIM)[:, None]
        gl.store(out + (o_r * (rows.row // 2) + o_d // 2)[:, None] + (o_8 * (rows.row // 2))[None, :], both, mask=there)
    return gl.max((flaw != 0).to(gl.int32), 0)


@gluon.jit
def await_all(shared, t, ME: gl.constexpr, C: gl.constexpr):
    """Until a warpgroup's buffers hold nothing, when it has made all of its tiles before tile t."""
    for n in gl.static_range(C.DQ_BUFFERS):
        await_buffer(shared, t, n, ME, C)
