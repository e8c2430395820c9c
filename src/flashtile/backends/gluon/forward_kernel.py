"""The forward kernel for Hopper: one warp fetches tiles, two or three warpgroups of 64 rows each consume them.

Programs are persistent and take tasks from a counter, the longest first. The rings of key and value tiles, and the
store of a finished tile, continue from task to task.

Within a warpgroup the product S = Q K^T of one tile overlaps P V of the tile before it, and the softmax of S overlaps
the rest of P V. Key tiles come in falling order: those that the band cuts on the right, then full ones, then those that
it cuts on the left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.gluon.compatibility import fetch_tile, reinterpreted, thread_barrier
from flashtile.backends.gluon.forward_epilogue import Results, clear_flag, finish, heads_of_rows, store
from flashtile.backends.gluon.forward_scheduler import (
    FIELDS,
    FIRST_KEY,
    FIRST_SEEN,
    GAIN,
    LAST_KEY,
    LAST_SEEN,
    MAX_WARPGROUPS,
    NO_ROWS,
    POSITION,
    REAL_FROM,
    REAL_TO,
    ROWS,
    SEQUENCE,
    SKIP,
    SKIP_AFTER,
    STATE,
    STRETCHES,
    VALUE_GAIN,
    TaskDescriptor,
    Work,
    claim_task,
    find_task,
    key_tiles,
    post_stop,
    post_task,
    read_field,
    read_float,
    retire,
)
from flashtile.backends.gluon.ptx import BARRIERS, arrive, stay_before, sync
from flashtile.backends.gluon.softmax import (
    VisibleRange,
    from_threads,
    mask_scores,
    pack_weights,
    scaled,
    shape_scores,
    sum_over_threads,
    unit_of,
    unpack_weights,
    weigh,
    weigh_first,
    weigh_without_max,
)
from flashtile.backends.gpu.pdl import launch_dependents, wait_for_previous

WARPGROUP = gl.constexpr(128)  # threads
WARP = gl.constexpr(32)
TASK_SLOTS = gl.constexpr(3)  # a task that is ending, one that has begun, and one that is being posted


class Ring(NamedTuple):
    """A ring of tiles: buffers, their "full" barriers, and the first of their "free" named barriers."""

    tiles: Any
    full: Any
    free: Any


class Shared(NamedTuple):
    """What is in shared memory. q, out and weights: a tile per warpgroup. mailbox: TASK_SLOTS task descriptors."""

    q: Any
    q_full: Any
    q_free: Any
    k: Any
    v: Any
    out: Any
    mailbox: Any
    weights: Any  # P of a warpgroup's last tile if C.WEIGHTS_SHARED; else None


@gluon.jit(do_not_specialize=["flag_tiles", "tiles", "heads", "section", "tasks"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out,
    lse,
    flags,
    flag_tiles,
    counter,
    sink,
    rule,
    lengths,
    tiles,
    heads,
    section,
    tasks,
    C: gl.constexpr,
):
    """A persistent program for each processor. counter: two counters, 0 at launch and reset to 0 at exit."""
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    # Named barriers from the last one down, away from those of Triton.
    V_FREE: gl.constexpr = BARRIERS - C.STAGES
    K_FREE: gl.constexpr = V_FREE - C.STAGES
    QUERIES: gl.constexpr = ROWS // C.PACKED_HEADS
    q_tiles = gl.allocate_shared_memory(dtype, [C.CONSUMERS, 1, 1, QUERIES, C.PACKED_HEADS, C.BLOCK_D], q_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [C.CONSUMERS, 1], barrier)
    q_free = gl.allocate_shared_memory(gl.int64, [C.CONSUMERS, 1], barrier)
    k_tiles = gl.allocate_shared_memory(dtype, [C.STAGES, 1, 1, C.BLOCK_K, C.BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(
        dtype, [C.STAGES, 1, 1, v_desc.block_shape[2], v_desc.block_shape[3]], v_desc.layout
    )
    k_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], barrier)
    out_tiles = None
    if out_desc is not None:
        width: gl.constexpr = C.BLOCK_DV // C.OUT_PARTS
        out_tiles = gl.allocate_shared_memory(
            out_desc.dtype, [C.CONSUMERS, 1, 1, QUERIES, C.PACKED_HEADS, width], out_desc.layout
        )
    mailbox = gl.allocate_shared_memory(
        gl.int32, [TASK_SLOTS * FIELDS, MAX_WARPGROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    weights = None
    if C.WEIGHTS_SHARED:
        weights = gl.allocate_shared_memory(dtype, [C.CONSUMERS, ROWS, C.BLOCK_K], gl.NVMMASharedLayout(128, 8, 2))
    for n in gl.static_range(C.CONSUMERS):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_free.index(n), count=1)
    for n in gl.static_range(C.STAGES):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(v_full.index(n), count=1)
    wait_for_previous(dtype == gl.float8e4nv)  # transpose_kernel is launched before
    launch_dependents(True)
    shared = Shared(
        q_tiles,
        q_full,
        q_free,
        Ring(k_tiles, k_full, K_FREE),
        Ring(v_tiles, v_full, V_FREE),
        out_tiles,
        mailbox,
        weights,
    )
    work = Work(rule, lengths, tiles, heads, section, tasks)
    results = Results(out_desc, out, lse, flags, flag_tiles)
    if C.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (shared, results, sink, rule, lengths.cu_q, 0, C)),
                (consume, (shared, results, sink, rule, lengths.cu_q, 1, C)),
                (load, (shared, q_desc, k_desc, v_desc, results, counter, work, C)),
            ],
            [4, 1],
            [C.REGISTERS, C.LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (shared, results, sink, rule, lengths.cu_q, 0, C)),
                (consume, (shared, results, sink, rule, lengths.cu_q, 1, C)),
                (consume, (shared, results, sink, rule, lengths.cu_q, 2, C)),
                (load, (shared, q_desc, k_desc, v_desc, results, counter, work, C)),
            ],
            [4, 4, 1],
            [C.REGISTERS, C.REGISTERS, C.LOAD_REGISTERS],
        )


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next buffer of a ring, and the phase of its barrier, which flips when the ring wraps around."""
    slot += 1
    wrapped = (slot == STAGES).to(gl.int32)
    return slot * (1 - wrapped), phase ^ wrapped


# ---- load ----


@gluon.jit
def load(shared, q_desc, k_desc, v_desc, results, counter, work, C: gl.constexpr):
    """Fetch the tiles of one task after the other. Keys run one tile ahead of values, in the order of their use."""
    k_slot = gl.to_tensor(0)
    v_slot = gl.to_tensor(0)
    k_count = gl.to_tensor(0)
    v_count = gl.to_tensor(0)
    q_phase = gl.to_tensor(1)
    task_slot = gl.to_tensor(0)
    task, number = next_task(gl.program_id(0), counter, work, C)
    while number < work.tasks:
        tiles = key_tiles(task, task.row, ROWS * C.CONSUMERS, work, C)
        k_head = task.head * C.PACKED_HEADS // C.GROUP
        k_at = task.k_start + (tiles[3] - 1) * C.BLOCK_K
        sequence = task.sequence
        if work.lengths.cu_q is not None:
            sequence = 0
        k_slot, k_count = fetch(shared.k, k_desc, [sequence, k_head, k_at, 0], k_slot, k_count, C)
        post_task(TaskDescriptor(shared.mailbox, task_slot * FIELDS), task, tiles, results, work, C)
        task_slot, _ = advance(task_slot, 0, TASK_SLOTS)
        for n in gl.static_range(C.CONSUMERS):
            mbarrier.wait(shared.q_free.index(n), q_phase)
            q_at = task.q_start + (task.row + n * ROWS) // C.PACKED_HEADS
            mbarrier.expect(shared.q_full.index(n), q_desc.block_type.nbytes)
            fetch_tile(q_desc, [sequence, task.head, q_at, 0, 0], shared.q_full.index(n), shared.q.index(n))
        q_phase ^= 1
        for _ in range(tiles[0] + 1, tiles[3]):
            v_at = k_at
            k_at -= C.BLOCK_K
            k_slot, k_count = fetch(shared.k, k_desc, [sequence, k_head, k_at, 0], k_slot, k_count, C)
            v_slot, v_count = fetch(shared.v, v_desc, values_at(v_desc, sequence, k_head, v_at), v_slot, v_count, C)
        v_slot, v_count = fetch(shared.v, v_desc, values_at(v_desc, sequence, k_head, k_at), v_slot, v_count, C)
        # Claim as late as the rings allow; claimed earlier, one program could get two long tasks.
        task, number = next_task(claim_task(counter) + gl.num_programs(0), counter, work, C)
    post_stop(TaskDescriptor(shared.mailbox, task_slot * FIELDS))
    for n in gl.static_range(C.CONSUMERS):
        mbarrier.wait(shared.q_free.index(n), q_phase)
        mbarrier.arrive(shared.q_full.index(n), count=1)
    retire(counter)


@gluon.jit
def next_task(number, counter, work, C: gl.constexpr):
    """The first task with rows, from this number on."""
    task = find_task(gl.minimum(number, work.tasks - 1), work, C)
    if work.lengths.cu_q is not None:
        while (number < work.tasks) & (task.row >= task.q_len):
            number = claim_task(counter) + gl.num_programs(0)
            task = find_task(gl.minimum(number, work.tasks - 1), work, C)
    return task, number


@gluon.jit
def values_at(desc, sequence, head, key):
    """The coordinates of values; those of 8 bits are transposed."""
    if desc.dtype == gl.float8e4nv:
        return [sequence, head, 0, key]
    else:
        return [sequence, head, key, 0]


@gluon.jit
def fetch(ring, desc, at, slot, count, C: gl.constexpr):
    """Fetch a tile once its buffer is free. count: tiles so far."""
    if count >= C.STAGES:
        sync(ring.free + slot, WARP + WARPGROUP * C.CONSUMERS)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    fetch_tile(desc, at, ring.full.index(slot), ring.tiles.index(slot))
    slot, _ = advance(slot, 0, C.STAGES)
    return slot, count + 1


# ---- consume ----


@gluon.jit
def release_slot(ring, slot, C: gl.constexpr):
    """Release a buffer that this warpgroup has read; the last warpgroup frees it."""
    arrive(slot + ring.free, WARP + WARPGROUP * C.CONSUMERS)


@gluon.jit
def skip_tiles(shared, slot, phase, tiles, C: gl.constexpr):
    """Release tiles that only other warpgroups see."""
    for _ in range(tiles):
        slot, phase = advance(slot, phase, C.STAGES)
        mbarrier.wait(shared.k.full.index(slot), phase)
        release_slot(shared.k, slot, C)
        mbarrier.wait(shared.v.full.index(slot), phase)
        release_slot(shared.v, slot, C)
    return slot, phase


@gluon.jit
def key_tile(ring, slot, C: gl.constexpr):
    return ring.tiles.index(slot).reshape([C.BLOCK_K, C.BLOCK_D]).permute((1, 0))


@gluon.jit
def value_tile(ring, slot, C: gl.constexpr):
    tile = ring.tiles.index(slot)
    if tile.dtype == gl.float8e4nv:  # the matrix unit needs contiguous keys
        return tile.reshape([C.BLOCK_DV, C.BLOCK_K]).permute((1, 0))
    else:
        return tile.reshape([C.BLOCK_K, C.BLOCK_DV])


@gluon.constexpr_function
def sum_layout(columns, dtype):
    """The layout of [ROWS, columns] sums of products of this dtype in a warpgroup's registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // dtype.primitive_bitwidth])


@gluon.constexpr_function
def weight_layout(columns, dtype):
    """The layout of P as a factor of values with this many columns."""
    return gl.DotOperandLayout(0, sum_layout(columns, dtype), 32 // dtype.primitive_bitwidth)


@gluon.jit
def keep_weights(p, shared, WG: gl.constexpr, C: gl.constexpr):
    """Keep P until its values are there: packed in registers, or in shared memory, which frees the registers."""
    dtype: gl.constexpr = shared.q.dtype
    packed = pack_weights(p, dtype)
    if C.WEIGHTS_SHARED:
        words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        reinterpreted(shared.weights.index(WG), gl.int32, packed.shape, words).store(packed)
        fence_async_shared()
        packed = gl.to_tensor(0)
    return packed


@gluon.jit
def begin_pv(p, o, shared, slot, WG: gl.constexpr, C: gl.constexpr):
    """Issue o + P V, of a P from keep_weights()."""
    dtype: gl.constexpr = shared.q.dtype
    kept = shared.weights.index(WG) if C.WEIGHTS_SHARED else unpack_weights(p, dtype, weight_layout(C.BLOCK_DV, dtype))
    return warpgroup_mma(kept, value_tile(shared.v, slot, C), o, is_async=True)


@gluon.jit
def end_pv(o, p, C: gl.constexpr):
    """Wait for P V. ptxas must not reuse the registers of p before that."""
    if C.WEIGHTS_SHARED:
        return warpgroup_mma_wait(0, deps=(o,))
    else:
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        return o


@gluon.jit
def step(
    p,
    m,
    l,
    o,
    factor,
    slot,
    phase,
    j0,
    q,
    shared,
    seen,
    rule,
    unit,
    WG: gl.constexpr,
    MASKED: gl.constexpr,
    C: gl.constexpr,
):
    """Take in the keys of the next tile, and the values of the tile before it, whose weights are p.

    factor: what o has to be multiplied with once it contains these values.
    """
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = sum_layout(C.BLOCK_K, dtype)
    before = slot
    phase_before = phase
    slot, phase = advance(slot, phase, C.STAGES)
    j0 -= C.BLOCK_K
    mbarrier.wait(shared.k.full.index(slot), phase)
    zero = gl.zeros([ROWS, C.BLOCK_K], gl.float32, s_layout)
    s_later = warpgroup_mma(q, key_tile(shared.k, slot, C), zero, use_acc=False, is_async=True)
    before_p = p
    mbarrier.wait(shared.v.full.index(before), phase_before)
    o_later = begin_pv(p, o, shared, before, WG, C)
    s = warpgroup_mma_wait(1, deps=(s_later,))
    release_slot(shared.k, slot, C)
    s = shape_scores(s, rule, seen, j0)
    if MASKED:
        s = mask_scores(s, seen, j0, True, rule.left is not None)
    rescale = factor
    if C.SKIP_MAX and not MASKED:
        p, m, l, factor = weigh_without_max(s, m, l, unit)
    else:
        p, m, l, alpha = weigh(s, m, l, unit, dtype)
        rescale = factor * alpha
        factor = factor * 0 + 1
    stay_before(l)
    o = end_pv(o_later, before_p, C)
    release_slot(shared.v, before, C)
    return keep_weights(p, shared, WG, C), m, l, scaled(o, rescale), factor, slot, phase, j0


@gluon.jit
def consume(shared, results, sink, rule, cu_q, WG: gl.constexpr, C: gl.constexpr):
    """The role of one warpgroup: ROWS rows of each task, from the first product to the stored output."""
    q = shared.q.index(WG).reshape([ROWS, C.BLOCK_D])
    dtype: gl.constexpr = q.dtype
    s_layout: gl.constexpr = sum_layout(C.BLOCK_K, dtype)
    o_layout: gl.constexpr = sum_layout(C.BLOCK_DV, dtype)
    in_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    in_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    slot = gl.to_tensor(C.STAGES - 1)
    phase = gl.to_tensor(1)
    q_phase = gl.to_tensor(0)
    task_slot = gl.to_tensor(0)
    mbarrier.wait(shared.q_full.index(WG), 0)
    descriptor = TaskDescriptor(shared.mailbox, task_slot * FIELDS)
    if C.MAY_BE_EMPTY:
        descriptor, task_slot, slot, phase, q_phase = skip_empty_tasks(
            descriptor, task_slot, slot, phase, q_phase, shared, WG, C
        )
    while read_field(descriptor, STATE, WG) != 0:
        seen = visible_range(descriptor, rule, in_s, WG, C)
        unit = unit_of(rule, seen.gain)
        o = gl.zeros([ROWS, C.BLOCK_DV], gl.float32, o_layout)
        clear_flag(descriptor, results, WG)

        slot, phase = skip_tiles(shared, slot, phase, read_field(descriptor, SKIP, WG), C)
        slot, phase = advance(slot, phase, C.STAGES)
        j0 = read_field(descriptor, FIRST_KEY, WG)
        mbarrier.wait(shared.k.full.index(slot), phase)
        zero = gl.zeros([ROWS, C.BLOCK_K], gl.float32, s_layout)
        s_later = warpgroup_mma(q, key_tile(shared.k, slot, C), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s_later,))
        release_slot(shared.k, slot, C)
        s = shape_scores(s, rule, seen, j0)
        if not C.ALL_FULL:
            s = mask_scores(s, seen, j0, True, rule.left is not None)
        p, m, l = weigh_first(s, unit, dtype)
        factor = m * 0 + 1
        p = keep_weights(p, shared, WG, C)
        for n in gl.static_range(1 if C.ONE_RIGHT_CUT else 0, 2 if rule.left is None else 3):
            for _ in range(read_field(descriptor, STRETCHES + n, WG)):
                p, m, l, o, factor, slot, phase, j0 = step(
                    p, m, l, o, factor, slot, phase, j0, q, shared, seen, rule, unit, WG, n != 1, C
                )
        mbarrier.arrive(shared.q_free.index(WG), count=1)
        thread_barrier()
        mbarrier.wait(shared.v.full.index(slot), phase)
        o_later = begin_pv(p, o, shared, slot, WG, C)
        o_r = gl.arange(0, ROWS, in_s)
        real = (o_r >= read_field(descriptor, REAL_FROM, WG)) & (o_r < read_field(descriptor, REAL_TO, WG))
        m = from_threads(m, in_s)
        l = sum_over_threads(l, dtype, in_s)
        weight, row_lse, lost = finish(m, l, sink, seen, descriptor, WG, C)
        weight = weight * from_threads(factor, in_s)
        if rule.descale is not None:
            weight = weight * read_float(descriptor, VALUE_GAIN, WG)
            lost = lost | (seen.gain <= 0)  # then the largest of s is no maximum
        o = end_pv(o_later, p, C)
        release_slot(shared.v, slot, C)
        if rule.left is not None:
            slot, phase = skip_tiles(shared, slot, phase, read_field(descriptor, SKIP_AFTER, WG), C)
        o = o * gl.convert_layout(weight, in_o, assert_trivial=True)[:, None]
        flaw = gl.convert_layout(gl.sum(o * 0.0, 1), in_s, assert_trivial=True)  # 0, or NaN where o is not finite
        store(o, row_lse, real & (lost | (flaw != 0)), real, shared.out, results, descriptor, cu_q, WG, C)
        descriptor, task_slot, q_phase = next_descriptor(task_slot, q_phase, shared, WG)
        if C.MAY_BE_EMPTY:
            descriptor, task_slot, slot, phase, q_phase = skip_empty_tasks(
                descriptor, task_slot, slot, phase, q_phase, shared, WG, C
            )
    tma.store_wait(0)


@gluon.jit
def next_descriptor(task_slot, q_phase, shared, WG: gl.constexpr):
    """Wait for the next task."""
    q_phase ^= 1
    mbarrier.wait(shared.q_full.index(WG), q_phase)
    task_slot, _ = advance(task_slot, 0, TASK_SLOTS)
    return TaskDescriptor(shared.mailbox, task_slot * FIELDS), task_slot, q_phase


@gluon.jit
def skip_empty_tasks(descriptor, task_slot, slot, phase, q_phase, shared, WG: gl.constexpr, C: gl.constexpr):
    """Release the tiles of tasks without rows for this warpgroup, which leaves the processor to the others."""
    while read_field(descriptor, STATE, WG) == NO_ROWS:
        slot, phase = skip_tiles(shared, slot, phase, read_field(descriptor, SKIP, WG), C)
        thread_barrier()
        mbarrier.arrive(shared.q_free.index(WG), count=1)
        thread_barrier()
        descriptor, task_slot, q_phase = next_descriptor(task_slot, q_phase, shared, WG)
    return descriptor, task_slot, slot, phase, q_phase


@gluon.jit
def visible_range(descriptor, rule, LAYOUT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The range of keys that each row of a warpgroup sees."""
    o_i = gl.arange(0, ROWS, LAYOUT) // C.PACKED_HEADS
    last = o_i * 0 + read_field(descriptor, LAST_KEY, WG)
    if rule.right is not None:
        last = gl.minimum(o_i + read_field(descriptor, LAST_SEEN, WG), last)
    first = 0
    if rule.left is not None:
        first = o_i + read_field(descriptor, FIRST_SEEN, WG)
    at = 0
    slope = 0.0
    if rule.alibi is not None:
        at = o_i + read_field(descriptor, POSITION, WG)
        in_rows: gl.constexpr = LAYOUT
        head = heads_of_rows(descriptor, in_rows, WG, C)
        slope = gl.load(
            rule.alibi + read_field(descriptor, SEQUENCE, WG) * rule.alibi_sequence + head * rule.alibi_head
        )
    gain = 1.0
    if rule.descale is not None:
        gain = read_float(descriptor, GAIN, WG)
    return VisibleRange(last, first, at, slope, gain)
