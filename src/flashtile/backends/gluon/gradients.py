"""The launches of a backward pass on Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon import tuning
from flashtile.backends.gluon.backward_kernel import backward_kernel
from flashtile.backends.gluon.descriptors import descriptors, outline_of
from flashtile.backends.gluon.row_kernels import begin_kernel, finish_kernel
from flashtile.backends.gluon.tickets import tickets
from flashtile.backends.gluon.tuning import ROWS
from flashtile.backends.triton import launch as portable
from flashtile.backends.triton.arguments import bits, block, lengths, rule
from flashtile.backends.triton.start import Start
from flashtile.backends.triton.tensors import Result, empty, strides
from flashtile.dtypes import ITEMSIZE
from flashtile.inputs import Inputs
from flashtile.problem import Problem
from flashtile.results import Gradients


class Constants(NamedTuple):
    """What the kernel is compiled for; every field is a constexpr."""

    GROUP: Any
    DIM: Any
    DIM_V: Any
    BLOCK_D: Any
    BLOCK_Q: Any
    KEYS: Any  # of a task
    DOUT_STAGES: Any
    PARTS: Any  # tiles of 64 x 64 that a warpgroup makes of dQ, of a tile of queries
    DQ_BUFFERS: Any  # of a warpgroup
    SCORES_FIRST: Any  # see tuning.Steps
    PACKED: Any
    ENDS: Any  # of a tile of keys some may not be in use, though they are in memory
    ALWAYS_CUT: Any  # the first so many tiles of queries are cut, in every column of keys
    CUT_AT_BEGIN: Any  # tiles may be cut by the right of the band
    CUT_AT_END: Any  # tiles may be cut by the left of the band
    PERSISTENT: Any  # a program takes one task after the other
    OUT_TILES: Any  # of dK or dV, each of a warpgroup, that all buffers of dQ can hold


class Backward:
    """Statistics of rows, the kernel, dQ in its dtype, and what is to be mended.

    given: outlines of dout, out, lse and dlse.
    """

    def __init__(self, p: Problem, device: Any, given: tuple[Any, ...]) -> None:
        self._device, self._packed, self._ordered = device, p.packed, p.deterministic
        dout = given[0].to(p.q.dtype)  # as the copy engine fetches it
        self._narrow = p.q.dtype if given[0].dtype != p.q.dtype else None
        given = (dout, *given[1:])
        config, width = tuning.backward(max(p.dim, p.dim_v)), max(64, block(max(p.dim, p.dim_v)))
        n_rows, n_keys, batch = p.q.shape[2], p.k.shape[2], p.q.shape[0]
        self._rule, self._lengths, self._scale = rule(p), lengths(p), bits(p.scale)
        given_rows = [None if x is None else strides(x, p) for x in given]
        pads = portable.count_tiles(p, p.n_q, n_rows, config.keys)
        padded, columns = pads * config.keys, p.heads * batch
        self._rows = (2, batch, p.heads, padded)  # lse in base 2 and delta, side by side for one copy
        self._delta = Result(p, p.heads, n_rows, None, "float32", device)
        self._dq = Result(p, p.heads, n_rows, p.dim, p.dtype, device)
        self._dk = Result(p, p.kv_heads, n_keys, p.dim, p.dtype, device)
        self._dv = Result(p, p.kv_heads, n_keys, p.dim_v, p.dtype, device)
        # No one has a use for the memory of dQ before the kernel is done, nor for these statistics after it.
        self._rows_in_dq = self._dq.numel * ITEMSIZE[p.dtype] >= 2 * columns * padded * 4
        k_tiles, marks_k = (portable.count_tiles(p, p.n_k, n_keys, n) for n in (config.keys, ROWS))
        marks_q = portable.count_tiles(p, p.n_q, n_rows, ROWS)
        size = columns * padded * width
        self._new_rows, self._new_total = (empty(n, torch.float32, device) for n in (self._rows, (size,)))
        self._new_turns = empty((size // 4096,), torch.int32, device)
        self._heads_at = portable.heads_at(p)
        of_mend = (given_rows[0], given_rows[2], self._delta.strides, None)
        grads = (self._dq, self._dk, self._dv)
        self._mend = portable.MendBackward(p, device, ROWS, ROWS, of_mend, grads, natural=True)
        q_box, k_box = ([1, 1, n, width] for n in (config.block_q, config.keys))
        out_box = [1, 1, ROWS, min(width, 128)]  # what a warpgroup has
        rows = torch.empty(self._rows, dtype=torch.float32, device="meta")
        total = torch.empty((size // 256, 256), dtype=torch.float32, device="meta")
        blocks = (
            descriptors(p.q, q_box),
            descriptors(p.k, k_box),
            descriptors(p.v, k_box),
            descriptors(dout, q_box),
            descriptors(rows, [2, 1, 1, config.block_q], swizzled=False),
            descriptors(total, [16, 256], swizzled=False),
            descriptors(outline_of(self._dk, batch, p.kv_heads, n_keys, p.dim), out_box),
            descriptors(outline_of(self._dv, batch, p.kv_heads, n_keys, p.dim_v), out_box),
        )
        self._begin_counts = (pads, p.heads, padded, columns)
        self._begin = Start(
            begin_kernel,
            pads * columns,
            {"num_warps": 8},
            portable.present(*given_rows, None, self._delta.strides),
            DIM_V=p.dim_v,
            BLOCK_DV=block(p.dim_v),
            BLOCK_D=width,
            PAD=config.keys,
        )
        tasks = k_tiles * p.kv_heads * batch
        processors = portable.processors(device)
        section = tuning.section(k_tiles, p.kv_heads * batch, processors)
        self._counts = (k_tiles, p.kv_heads, section, padded, marks_k, tasks)
        programs = min(tasks, processors) if _persistent(config) else tasks
        # Packed queries and keys that begin at the same places, being one tensor, have a diagonal each.
        self._starts = {
            alike: Start(
                backward_kernel,
                programs,
                {"num_warps": 4},
                {8: self._dk.strides, 9: self._dv.strides},
                blocks=dict(enumerate(blocks)),
                C=constants(p, config, width, alike),
            )
            for alike in (False, True)
        }
        self._finish_counts = (marks_q, p.heads, padded)
        rows_of_dq = portable.present(None, self._dq.strides)
        self._finish = Start(
            finish_kernel, marks_q * columns, rows=rows_of_dq, DIM=p.dim, BLOCK_D=width, PAD=config.keys
        )

    def __call__(self, x: Inputs, *given: Any) -> Gradients:
        if self._narrow is not None:
            given = (given[0].to(self._narrow), *given[1:])
        dout, _out, lse, _dlse = given
        dq, dk, dv, delta = self._dq.empty(), self._dk.empty(), self._dv.empty(), self._delta.empty()
        rows = dq.view(torch.float32) if self._rows_in_dq else self._new_rows()
        total, turns = self._new_total(), self._new_turns() if self._ordered else None
        marks = self._mend.make()
        if self._packed:
            marks.zero_()  # tiles that no sequence has are never written
        of_queries = marks[self._mend.first_of_queries :]
        a_rule, a_lengths = portable.rule_of(self._rule, x), portable.lengths_of(self._lengths, x)
        self._begin(*given, rows, delta, total, turns, a_lengths, *self._begin_counts)
        alike = x.cu_q is not None and x.cu_q.data_ptr() == x.cu_k.data_ptr()
        self._starts[alike](
            *(x.q, x.k, x.v, dout),
            *(rows, total, dk, dv),
            dk,
            dv,
            marks,
            tickets(self._device),
            turns,
            a_rule,
            a_lengths,
            *self._counts,
        )
        self._finish(total, dq, of_queries, self._scale, a_lengths, *self._finish_counts)
        self._mend(x, dout, lse, delta, None, dq, dk, dv, marks)
        dsink = None
        if x.sink is not None:
            dsink = portable.sink_gradient(x.sink, lse, delta, self._heads_at)
        return Gradients(dq, dk, dv, None, dsink)


def _persistent(config: tuning.Steps) -> bool:
    """Wide gradients leave by the buffers of queries, which a next task would fill."""
    return config.keys > ROWS


def constants(p: Problem, config: tuning.Steps, width: int, alike: bool) -> Constants:
    """alike: packed queries and keys begin at the same places."""
    always_cut = tuning.always_cut(p, alike)
    a_rule = rule(p)
    sizes = (p.group, p.dim, p.dim_v, width, config.block_q, config.keys, config.dout_stages)
    ends = p.packed or p.kv_lengths is not None
    cut = (always_cut, a_rule.right is not None and not always_cut, a_rule.left is not None)
    dq = (config.block_q * width // (2 * 64 * 64), config.dq_buffers, config.scores_first)
    out_tiles = 2 * config.dq_buffers * 64 * 64 * 4 // (ROWS * width * 2)
    return Constants(*map(gl.constexpr, (*sizes, *dq, p.packed, ends, *cut, _persistent(config), out_tiles)))
