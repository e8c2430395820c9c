"""The epilogue of a warpgroup of the forward pass: output, lse, and the nonfinite flag of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from flashtile.backends.gluon.compatibility import send_tile, thread_barrier
from flashtile.backends.gluon.forward_scheduler import (
    FLAG,
    HEAD,
    LSE,
    QUERY,
    REAL_FROM,
    REAL_TO,
    ROWS,
    SEQUENCE,
    read_field,
)
from flashtile.backends.gpu.scores import LN2, LOG2E


class Results(NamedTuple):
    """The outputs: out as a descriptor and as a pointer, lse, and a flag for each tile of ROWS rows."""

    desc: Any
    out: Any
    lse: Any
    flags: Any
    flag_tiles: Any  # of one head


@gluon.jit
def heads_of_rows(descriptor, LAYOUT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    return read_field(descriptor, HEAD, WG) * C.PACKED_HEADS + gl.arange(0, ROWS, LAYOUT) % C.PACKED_HEADS


@gluon.jit
def finish(m, l, sink, seen, descriptor, WG: gl.constexpr, C: gl.constexpr):
    """The factor of o (eq. 7), lse, and the rows that see keys but have no usable sum."""
    empty = seen.last < gl.maximum(seen.first, 0)
    lost = (l - l != 0) | ((l == 0) & (empty == 0))
    weight = 1 / gl.where(l == 0, 1.0, l)
    if sink is not None:  # a key whose value is 0
        rows: gl.constexpr = m.type.layout
        logit = gl.load(sink + heads_of_rows(descriptor, rows, WG, C)).to(gl.float32) * LOG2E
        top = gl.maximum(m, logit)
        kept = gl.exp2(m - top)
        l = l * kept + gl.exp2(logit - top)
        m = top
        weight = kept / l
    return weight, gl.where(l == 0, -float("inf"), (m + gl.log2(l)) * LN2), lost


@gluon.jit
def clear_flag(descriptor, results, WG: gl.constexpr):
    """Clear the flag of this warpgroup's rows."""
    if (read_field(descriptor, REAL_TO, WG) > 0) & (read_field(descriptor, REAL_FROM, WG) < ROWS):
        gl.store(results.flags + read_field(descriptor, FLAG, WG), 0)


@gluon.jit
def split_columns(x):
    """The left and the right half of the columns; no data moves."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def store(o, row_lse, spoiled, real, out_tiles, results, descriptor, cu_q, WG: gl.constexpr, C: gl.constexpr):
    """Store output, lse and flag of ROWS rows. The output leaves by descriptor, which clips at the tensor's end."""
    out_dtype: gl.constexpr = results.out.ptr.dtype.element_ty
    sequence = read_field(descriptor, SEQUENCE, WG)
    if cu_q is not None:
        sequence = 0
    last = read_field(descriptor, REAL_TO, WG)
    if results.desc is not None:
        WIDTH: gl.constexpr = C.BLOCK_DV // C.OUT_PARTS
        buffer = out_tiles.index(WG)
        parts = (o.to(out_dtype),) if C.OUT_PARTS == 1 else split_columns(o.to(out_dtype))
        inside = (last > 0) & (read_field(descriptor, REAL_FROM, WG) <= 0)
        if cu_q is not None:  # the next sequence begins where this one ends
            inside = last >= ROWS
        for n in gl.static_range(C.OUT_PARTS):
            tma.store_wait(0)
            thread_barrier()
            buffer.reshape([ROWS, WIDTH]).store(parts[n])
            fence_async_shared()
            thread_barrier()
            if inside:
                at = [sequence, read_field(descriptor, HEAD, WG), read_field(descriptor, QUERY, WG), 0, n * WIDTH]
                send_tile(results.desc, at, buffer)
    in_s: gl.constexpr = real.type.layout
    o_r = gl.arange(0, ROWS, in_s)
    if results.desc is None or cu_q is not None:
        by_pointer = real
        if results.desc is not None:
            by_pointer = real & (last < ROWS)
        out = results.out
        head = heads_of_rows(descriptor, in_s, WG, C)
        row = read_field(descriptor, QUERY, WG) + o_r // C.PACKED_HEADS
        offset = sequence.to(gl.int64) * out.sequence if cu_q is None else 0
        offset = offset + head.to(gl.int64) * out.head + row.to(gl.int64) * out.row
        rows: gl.constexpr = gl.SliceLayout(1, o.type.layout)
        offset = gl.convert_layout(offset, rows, assert_trivial=True)
        by_pointer = gl.convert_layout(by_pointer, rows, assert_trivial=True)
        o_v = gl.arange(0, C.BLOCK_DV, gl.SliceLayout(0, o.type.layout))
        there = by_pointer[:, None] & (o_v < C.DIM_V)[None, :]
        gl.store(out.ptr + offset[:, None] + o_v[None, :], o.to(out_dtype), mask=there)
    lse = results.lse
    at = read_field(descriptor, LSE, WG) + o_r // C.PACKED_HEADS * lse.row
    if C.PACKED_HEADS > 1:
        at += o_r % C.PACKED_HEADS * lse.head
    gl.store(lse.ptr + at, row_lse, mask=real)
    gl.store(results.flags + (o_r * 0 + read_field(descriptor, FLAG, WG)), o_r * 0 + 1, mask=spoiled)
