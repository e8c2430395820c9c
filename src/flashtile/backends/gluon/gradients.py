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
from flashtile.backends.triton.chain import FOLLOWING
from flashtile.backends.triton.scratch import Scratch, after
from flashtile.backends.triton.start import At, Series, Start
from flashtile.backends.triton.tensors import Result, rounded, rounded_outline, strides
from flashtile.dtypes import ITEMSIZE
from flashtile.inputs import Inputs
from flashtile.problem import Problem
from flashtile.results import Grads

# The values of a backward pass.
Q, K, V, DOUT, OUT, LSE, DLSE, DQ, DK, DV, SCRATCH, TICKETS, SINK, RULE, LENGTHS = map(At, range(15))


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
        self._device, self._packed = device, p.packed
        dout = rounded_outline(given[0], p)
        self._narrow = None if dout is given[0] else dout.dtype
        given = (dout, *given[1:])
        config, width = tuning.backward(max(p.dim, p.dim_v)), max(64, block(max(p.dim, p.dim_v)))
        n_rows, n_keys, batch = p.q.shape[2], p.k.shape[2], p.q.shape[0]
        self._rule, self._lengths = rule(p), lengths(p)
        given_rows = [None if x is None else strides(x, p) for x in given]
        pads = portable.count_tiles(p, p.n_q, n_rows, config.keys)
        padded, columns = pads * config.keys, p.heads * batch
        rows_shape = (2, batch, p.heads, padded)  # lse in base 2 and delta, side by side for one copy
        delta_like = Result(p, p.heads, n_rows, None, "float32", device)
        self._dq = Result(p, p.heads, n_rows, p.dim, p.dtype, device)
        self._dk = Result(p, p.kv_heads, n_keys, p.dim, p.dtype, device)
        self._dv = Result(p, p.kv_heads, n_keys, p.dim_v, p.dtype, device)
        # No one has a use for the memory of dQ before the kernel is done, nor for these statistics after it.
        rows_in_dq = self._dq.numel * ITEMSIZE[p.dtype] >= 2 * columns * padded * 4
        k_tiles, marks_k = (portable.count_tiles(p, p.n_k, n_keys, n) for n in (config.keys, ROWS))
        marks_q = portable.count_tiles(p, p.n_q, n_rows, ROWS)
        size = columns * padded * width
        self._heads_at = portable.heads_at(p)
        of_mend = (given_rows[0], given_rows[2], delta_like.strides, None)
        grads = (self._dq, self._dk, self._dv)
        chained = portable.chains(device)
        follows = FOLLOWING if chained else {}
        mend = portable.MendBackward(p, device, ROWS, ROWS, of_mend, grads, natural=True, chained=chained)
        scratch = Scratch(SCRATCH.place, device)
        total = scratch.part((size,), torch.float32)
        delta = self._delta = scratch.part(delta_like.shape, torch.float32)
        marks = self._marks = scratch.part((mend.count,), torch.int32)
        of_queries = after(marks, mend.first_of_queries)
        turns = scratch.part((size // 4096,), torch.int32) if p.deterministic else None
        rows = DQ._replace(make=_as_rows) if rows_in_dq else scratch.part(rows_shape, torch.float32)
        self._scratch = scratch.maker()
        q_box, k_box = ([1, 1, n, width] for n in (config.block_q, config.keys))
        out_box = [1, 1, ROWS, min(width, 128)]  # what a warpgroup has
        rows_outline = torch.empty(rows_shape, dtype=torch.float32, device="meta")
        total_outline = torch.empty((size // 256, 256), dtype=torch.float32, device="meta")
        blocks = (
            descriptors(p.q, q_box),
            descriptors(p.k, k_box),
            descriptors(p.v, k_box),
            descriptors(dout, q_box),
            descriptors(rows_outline, [2, 1, 1, config.block_q], swizzled=False),
            descriptors(total_outline, [16, 256], swizzled=False),
            descriptors(outline_of(self._dk, batch, p.kv_heads, n_keys, p.dim), out_box),
            descriptors(outline_of(self._dv, batch, p.kv_heads, n_keys, p.dim_v), out_box),
        )
        begin = Start(
            begin_kernel,
            pads * columns,
            {"num_warps": 8},
            portable.present(*given_rows, None, delta_like.strides),
            DIM_V=p.dim_v,
            BLOCK_DV=block(p.dim_v),
            BLOCK_D=width,
            PAD=config.keys,
            CHAINED=chained,
        )
        tasks = k_tiles * p.kv_heads * batch
        processors = portable.processors(device)
        section = tuning.section(k_tiles, p.kv_heads * batch, processors)
        counts = (k_tiles, p.kv_heads, section, padded, marks_k, tasks)
        programs = min(tasks, processors) if _persistent(config) else tasks
        # Packed queries and keys that begin at the same places, being one tensor, have a diagonal each.
        starts = {
            alike: Start(
                backward_kernel,
                programs,
                {"num_warps": 4} | follows,
                {8: self._dk.strides, 9: self._dv.strides},
                blocks=dict(enumerate(blocks)),
                C=constants(p, config, width, alike),
            )
            for alike in (False, True)
        }
        rows_of_dq = portable.present(None, self._dq.strides)
        finish = Start(
            finish_kernel,
            marks_q * columns,
            follows,
            rows_of_dq,
            DIM=p.dim,
            BLOCK_D=width,
            PAD=config.keys,
            CHAINED=chained,
        )
        given_at = (DOUT, OUT, LSE, DLSE)
        self._launch = {
            alike: Series(
                (begin, (*given_at, rows, delta, total, turns, LENGTHS, pads, p.heads, padded, columns)),
                (start, (Q, K, V, DOUT, rows, total, DK, DV, DK, DV, marks, TICKETS, turns, RULE, LENGTHS, *counts)),
                (finish, (total, DQ, of_queries, bits(p.scale), LENGTHS, marks_q, p.heads, padded)),
                *mend.steps(Q, K, V, DOUT, LSE, delta, None, DQ, DK, DV, SINK, marks, RULE, LENGTHS),
            )
            for alike, start in starts.items()
        }

    def __call__(self, x: Inputs, *given: Any) -> Grads:
        if self._narrow is not None:
            given = (rounded(given[0], self._narrow), *given[1:])
        dq, dk, dv, scratch = self._dq.empty(), self._dk.empty(), self._dv.empty(), self._scratch()
        if self._packed:
            self._marks.of(scratch).zero_()  # tiles that no sequence has are never written
        a_rule, a_lengths = portable.rule_of(self._rule, x), portable.lengths_of(self._lengths, x)
        alike = x.cu_q is not None and x.cu_q.data_ptr() == x.cu_k.data_ptr()
        ticket = tickets(self._device)
        self._launch[alike](x.q, x.k, x.v, *given, dq, dk, dv, scratch, ticket, x.sink, a_rule, a_lengths)
        dsink = None
        if x.sink is not None:
            dsink = portable.sink_gradient(x.sink, given[2], self._delta.of(scratch), self._heads_at)
        return Grads(dq, dk, dv, None, dsink)


def _as_rows(dq: Any) -> Any:
    """Its memory as statistics."""
    return dq.view(torch.float32)


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
