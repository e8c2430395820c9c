"""The tasks of the forward pass, tiles of query rows, and the task descriptors of each warpgroup.

The loading warp works them out, a lane for each warpgroup, and posts them in shared memory, because the warpgroups have
no registers to spare for numbers that they need once per task.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon import tuning
from flashtile.backends.gluon.compatibility import thread_barrier
from flashtile.backends.gpu.blocks import locate, sequence_bounds
from flashtile.backends.gpu.cuts import clip, cuts, reach
from flashtile.backends.gpu.unspecialized import plain

ROWS = gl.constexpr(tuning.ROWS)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
MAX_WARPGROUPS = gl.constexpr(4)

# The fields of a task descriptor; in backward_scheduler.py STATE, SEQUENCE, HEAD, FLAG and read_field() differ.
# Tiles come in falling order.
STATE = gl.constexpr(0)  # 0: no more tasks; NO_ROWS: this warpgroup has no rows of the task
SKIP = gl.constexpr(1)  # tiles before this warpgroup's first, which only others see
# Tiles after the first: cut by the band on the right, then full ones, then cut on the left.
STRETCHES = gl.constexpr(2)
SKIP_AFTER = gl.constexpr(5)
FIRST_KEY = gl.constexpr(6)  # of the first tile
LAST_SEEN = gl.constexpr(7)  # by the first row, if keys had no end
LAST_KEY = gl.constexpr(8)
FIRST_SEEN = gl.constexpr(9)  # by the first row
POSITION = gl.constexpr(10)  # of the first row, for alibi
REAL_FROM = gl.constexpr(11)  # rows that exist, from here ...
REAL_TO = gl.constexpr(12)  # ... to before here
SEQUENCE = gl.constexpr(13)
HEAD = gl.constexpr(14)
QUERY = gl.constexpr(15)  # of the first row in its tensor
LSE = gl.constexpr(16)  # of the first row, in elements
FLAG = gl.constexpr(17)
GAIN = gl.constexpr(18)  # descaling factors of q.k and of the output, as bits of a float32
VALUE_GAIN = gl.constexpr(19)
FIELDS = gl.constexpr(20)
NO_ROWS = gl.constexpr(2)


class TaskDescriptor(NamedTuple):
    """A mailbox in shared memory, and the index at which the descriptor of a task begins."""

    mailbox: Any
    begin: Any


class Work(NamedTuple):
    """All the work: counts of tiles, heads (packed heads count as one) and tasks, and what decides them."""

    rule: Any
    lengths: Any
    tiles: Any  # of one head; of all sequences if packed
    heads: Any
    section: Any  # heads whose keys and values share the L2
    tasks: Any


class Task(NamedTuple):
    """A tile: its sequence, head and first row, and the bounds of its sequence. row may be negative."""

    sequence: Any
    head: Any
    row: Any
    q_start: Any
    q_len: Any
    k_start: Any
    k_len: Any
    offset: Any


@gluon.jit
def find_task(number, work, C: gl.constexpr):
    """The task of a number. The last rows of a head come first: under a causal band they see the most keys.

    The first tile of a head is the one that may be short, because a short tile costs the least there. In packed
    sequences it is the last one, and a task may have no rows at all.
    """
    TILE: gl.constexpr = ROWS * C.CONSUMERS
    if work.lengths.cu_q is not None:
        head = number % work.heads
        tile = work.tiles - 1 - number // work.heads
        sequence, tile = locate(work.lengths.cu_q, work.lengths.n_q, tile, 0, work.lengths, TILE)
        at = sequence_bounds(work.lengths, work.rule.offset, sequence)
        row = tile * TILE
    else:
        at_once = work.tiles * work.section
        first = number // at_once * work.section
        beside = gl.minimum(work.section, work.heads * plain(work.lengths.sequences) - first)
        inside = number % at_once
        flat_head = first + inside % beside
        sequence = flat_head // work.heads
        head = flat_head % work.heads
        at = sequence_bounds(work.lengths, work.rule.offset, sequence)
        row = gl.cdiv(at.q_len * C.PACKED_HEADS, ROWS) * ROWS - (inside // beside + 1) * TILE
    return Task(sequence, head, row, at.q_start, at.q_len, at.k_start, at.k_len, at.offset)


@gluon.jit
def key_tiles(task, row, N_ROWS: gl.constexpr, work, C: gl.constexpr):
    """begin, full_begin, full_end, end of the key tiles that N_ROWS rows from `row` on see; at least one tile."""
    first = gl.maximum(row, 0) // C.PACKED_HEADS
    last = (gl.minimum(row + N_ROWS, task.q_len * C.PACKED_HEADS) - 1) // C.PACKED_HEADS
    last = gl.maximum(last, first) + 1
    rule = work.rule
    cut = cuts(reach(rule.left), reach(rule.right), task.offset, first, last, task.k_len, C.BLOCK_K)
    return cut[0], cut[1], cut[2], gl.maximum(cut[3], cut[0] + 1)


@gluon.jit
def post_task(descriptor, task, tiles, results, work, C: gl.constexpr):
    """Write the descriptor of a task, a lane for each warpgroup. tiles: key_tiles() of the program."""
    rule = work.rule
    row = task.row + ROWS * gl.arange(0, MAX_WARPGROUPS, LANES)
    begin, full_begin, full_end, end = key_tiles(task, row, ROWS, work, C)
    end = clip(end, tiles[0] + 1, tiles[3])
    begin = clip(begin, tiles[0], end - 1)
    full_end = clip(full_end, begin, end - 1)  # the first tile is always masked
    if not C.ONE_RIGHT_CUT:  # and the first full one too, so that every row has seen a key before the others
        full_end = gl.maximum(full_end - 1, begin)
    full_begin = clip(full_begin, begin, full_end)
    state = row * 0 + 1
    skip = tiles[3] - end
    if C.MAY_BE_EMPTY:
        no_rows = (row >= task.q_len * C.PACKED_HEADS) | (row + ROWS <= 0)
        state = gl.where(no_rows, NO_ROWS, state)
        skip = gl.where(no_rows, tiles[3] - tiles[0], skip)
    write_field(descriptor, STATE, state)
    write_field(descriptor, SKIP, skip)
    write_field(descriptor, STRETCHES, end - 1 - full_end)
    write_field(descriptor, STRETCHES + 1, full_end - full_begin)
    write_field(descriptor, STRETCHES + 2, full_begin - begin)
    write_field(descriptor, SKIP_AFTER, begin - tiles[0])
    write_field(descriptor, FIRST_KEY, (end - 1) * C.BLOCK_K)
    query = row // C.PACKED_HEADS
    at = query + task.offset
    if rule.right is not None:
        write_field(descriptor, LAST_SEEN, at + reach(rule.right))
    write_field(descriptor, LAST_KEY, row * 0 + task.k_len - 1)
    if rule.left is not None:
        write_field(descriptor, FIRST_SEEN, at - reach(rule.left))
    if rule.alibi is not None:
        write_field(descriptor, POSITION, at + plain(rule.alibi_offset))
    write_field(descriptor, REAL_FROM, -row)
    write_field(descriptor, REAL_TO, task.q_len * C.PACKED_HEADS - row)
    write_field(descriptor, SEQUENCE, row * 0 + task.sequence)
    write_field(descriptor, HEAD, row * 0 + task.head)
    query += task.q_start
    write_field(descriptor, QUERY, query)
    tile = row // ROWS
    sequence = task.sequence
    if work.lengths.cu_q is not None:
        tile += task.q_start // ROWS + task.sequence
        sequence = 0
    lse = results.lse
    write_field(descriptor, LSE, sequence * lse.sequence + task.head * C.PACKED_HEADS * lse.head + query * lse.row)
    write_field(descriptor, FLAG, (sequence * work.heads + task.head) * results.flag_tiles + tile)
    if rule.descale is not None:
        k_head = task.head * C.PACKED_HEADS // C.GROUP
        at = rule.descale + task.sequence * rule.descale_sequence + k_head * rule.descale_head + row * 0
        gain = gl.load(at) * gl.load(at + 1)
        write_field(descriptor, GAIN, gain.to(gl.int32, bitcast=True))
        write_field(descriptor, VALUE_GAIN, gl.load(at + 2).to(gl.int32, bitcast=True))
    thread_barrier()  # one lane then continues for the whole warp


@gluon.jit
def post_stop(descriptor):
    """Post that there are no more tasks."""
    write_field(descriptor, STATE, gl.zeros([MAX_WARPGROUPS], gl.int32, LANES))
    thread_barrier()


@gluon.jit
def claim_task(counter):
    """Take the next task number, which no other program gets."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def retire(counter):
    """Count this program as done; the last one resets both counters to 0."""
    if gl.atomic_add(counter + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def write_field(descriptor, FIELD: gl.constexpr, lanes):
    descriptor.mailbox.index(descriptor.begin + FIELD).store(lanes)


@gluon.jit
def read_field(descriptor, FIELD: gl.constexpr, WG: gl.constexpr):
    """A field of one warpgroup's descriptor."""
    return load_scalar(descriptor.mailbox.index(descriptor.begin + FIELD).slice(WG, 1))


@gluon.jit
def load_scalar(place):
    """Load a number from shared memory into every thread of the calling role."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return place.load(EACH).item()


@gluon.jit
def read_float(descriptor, FIELD: gl.constexpr, WG: gl.constexpr):
    return read_field(descriptor, FIELD, WG).to(gl.float32, bitcast=True)
