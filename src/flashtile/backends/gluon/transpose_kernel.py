"""Transposes 8-bit V for its product: contiguous keys, in the order in which a thread holds its weights."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.gpu.blocks import sequence_bounds, to_int64
from flashtile.backends.gpu.pdl import launch_dependents

KEYS = gl.constexpr(128)  # of a program: a tile of the forward kernel
WIDTH = gl.constexpr(64)  # columns that a warp transposes at a time
# [WIDTH, KEYS]: the values of a thread, keys first, and the lanes, columns first.
TRANSPOSED_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[16, 0], [32, 0], [0, 16], [0, 32], [0, 64]],
        [],
        [],
        [64, 128],
    )
)


@gluon.jit(do_not_specialize=["tiles", "heads"])
def transpose_kernel(v, transposed, rule, lengths, tiles, heads, DIM_V: gl.constexpr):
    """Transpose KEYS keys of a head. A thread has 16 keys by 16 columns, and moves bytes only between its registers.

    Of 16 keys, key 8j + 2t + e moves to position 4t + 2j + e. Keys that are not in use become 0, since they may be NaN.
    """
    launch_dependents(True)
    CHUNKS: gl.constexpr = gl.cdiv(DIM_V, WIDTH)
    program = gl.program_id(0) // CHUNKS
    first = gl.program_id(0) % CHUNKS * WIDTH
    sequence = program // tiles // heads
    head = program // tiles % heads
    at = sequence_bounds(lengths, rule.offset, sequence)
    rows: gl.constexpr = gl.BlockedLayout([16, 16], [8, 4], [1, 1], [1, 0])
    columns: gl.constexpr = TRANSPOSED_LAYOUT
    o_j = program % tiles * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, rows))
    o_d = first + gl.arange(0, WIDTH, gl.SliceLayout(0, rows))
    p_v = (
        v.ptr
        + to_int64(sequence) * v.sequence
        + to_int64(head) * v.head
        + to_int64(o_j)[:, None] * v.row
        + o_d[None, :]
    )
    x = gl.load(p_v, mask=(o_j < at.k_len)[:, None] & (o_d < DIM_V)[None, :], other=0.0)  # [keys, columns]
    x = gl.permute(gl.reshape(x, [KEYS // 16, 2, 4, 2, WIDTH]), (4, 0, 2, 1, 3))
    x = gl.convert_layout(gl.reshape(x, [WIDTH, KEYS]), columns, assert_trivial=True)
    o_n = program % tiles * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, columns))
    o_d = first + gl.arange(0, WIDTH, gl.SliceLayout(1, columns))
    p_transposed = transposed.ptr + to_int64(sequence) * transposed.sequence + to_int64(head) * transposed.head
    gl.store(p_transposed + to_int64(o_d)[:, None] * transposed.row + o_n[None, :], x, mask=(o_d < DIM_V)[:, None])
