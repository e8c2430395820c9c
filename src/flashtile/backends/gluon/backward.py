"""The launches of a backward pass on Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from flashtile.backends.gluon import tuning
from flashtile.backends.gluon.backward_kernel import backward_kernel
from flashtile.backends.gluon.descriptors import descriptor_maker, outline_of
from flashtile.backends.gluon.row_kernels import begin_kernel, finish_kernel
from flashtile.backends.gluon.tuning import ROWS
from flashtile.backends.gluon.work_counters import acquire_counters
from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import bits, block, lengths, lengths_of, rule, rule_of
from flashtile.backends.gpu.backward_rows import LARGE
from flashtile.backends.gpu.kernel_launch import (
    Argument,
    BoundLaunch,
    KernelLaunch,
    LaunchSequence,
    Maker,
    Strides,
    present,
)
from flashtile.backends.gpu.nonfinite import RecomputeBackward
from flashtile.backends.gpu.pdl import pdl_options, supports_pdl
from flashtile.backends.gpu.scratch import Scratch, after
from flashtile.backends.gpu.sink import head_axis, sink_gradient
from flashtile.backends.gpu.tensors import Result, count_tiles, results, rounded, rounded_outline, strides
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.problem import Problem
from flashtile.results import Grads

# The values of a backward pass.
Q, K, V, DOUT, OUT, LSE, DLSE, DQ, DK, DV, SCRATCH, COUNTERS, SINK, RULE, LENGTHS = map(Argument, range(15))


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
    SCORES_FIRST: Any  # see tuning.BackwardConfig
    PACKED: Any
    ENDS: Any  # of a tile of keys some may not be in use, though they are in memory
    ALWAYS_CUT: Any  # the first so many tiles of queries are cut, in every column of keys
    CUT_AT_BEGIN: Any  # tiles may be cut by the right of the band
    CUT_AT_END: Any  # tiles may be cut by the left of the band
    PERSISTENT: Any  # a program takes one task after the other
    OUT_TILES: Any  # of dK or dV, each of a warpgroup, that all buffers of dQ can hold


class Backward:
    """Statistics of rows, the kernel, dQ in its dtype, and what is to be recomputed.

    given: outlines of dout, out, lse and dlse.
    """

    def __init__(self, p: Problem, device: Any, given: tuple[Any, ...]) -> None:
        self._device, self._packed, self._head_axis = device, p.packed, head_axis(p)
        dout = rounded_outline(given[0], p)
        self._narrow = None if dout is given[0] else dout.dtype
        self._rule, self._lengths = rule(p), lengths(p)
        self._dq, self._dk, self._dv = grads = results(p, device)
        use_pdl = supports_pdl(device)
        of_given = [None if x is None else strides(x, p) for x in (dout, *given[1:])]
        delta = Result(p, p.heads, p.q.shape[2], None, "float32", device)
        recompute_strides = (strides(dout, p), *3 * (delta.strides,))
        recompute = RecomputeBackward(p, device, ROWS, ROWS, recompute_strides, grads, use_pdl)
        space = _Workspace(p, device, self._dq, delta, recompute.count, use_pdl)
        self._of_rows, self._flags, self._scratch = space.of_rows, space.flags, space.maker
        begin = _begin(p, space, present(*of_given, None, *3 * (delta.strides,)), use_pdl)
        finish = _finish(p, space, self._dq, after(space.flags, recompute.first_of_queries), use_pdl)
        recomputes = recompute.steps(Q, K, V, DOUT, *space.of_rows, DQ, DK, DV, SINK, space.flags, RULE, LENGTHS)
        blocks = _blocks(p, space, dout, *grads[1:])
        # Packed queries and keys that begin at the same places, being one tensor, have a diagonal each.
        self._launch = {
            same_starts: LaunchSequence(
                begin, self._kernel(p, space, blocks, same_starts, use_pdl), finish, *recomputes
            )
            for same_starts in (False, True)
        }

    def _kernel(
        self, p: Problem, space: _Workspace, blocks: list[Maker], same_starts: bool, use_pdl: bool
    ) -> BoundLaunch:
        config, columns, processors = space.config, p.kv_heads * p.q.shape[0], gpu.processors(self._device)
        tiles, flags = space.k_tiles, count_tiles(p, p.n_k, p.k.shape[2], ROWS)
        tasks = tiles * columns
        start = KernelLaunch(
            backward_kernel,
            min(tasks, processors) if _persistent(config) else tasks,
            {"num_warps": 4} | pdl_options(use_pdl),
            {8: self._dk.strides, 9: self._dv.strides},
            blocks=dict(enumerate(blocks)),
            C=constants(p, config, space.width, same_starts),
        )
        where = (Q, K, V, DOUT, space.rows, space.total, DK, DV, DK, DV, space.flags, COUNTERS)
        section = tuning.section(p, tiles, columns, processors)
        counts = (tiles, p.kv_heads, section, space.padded, flags, tasks)
        return start, (*where, space.turns, space.complete, RULE, LENGTHS, *counts)

    def __call__(self, x: Inputs, *given: Any) -> Grads:
        if self._narrow is not None:
            given = (rounded(given[0], self._narrow), *given[1:])
        dq, dk, dv, scratch = self._dq.empty(), self._dk.empty(), self._dv.empty(), self._scratch()
        if self._packed:
            self._flags.of(scratch).zero_()  # tiles that no sequence has are never written
        a_rule, a_lengths = rule_of(self._rule, x), lengths_of(self._lengths, x)
        same_starts = x.cu_q is not None and x.cu_q.data_ptr() == x.cu_k.data_ptr()
        shared = acquire_counters(self._device)
        self._launch[same_starts](
            x.q, x.k, x.v, *given, dq, dk, dv, scratch, shared.counters, x.sink, a_rule, a_lengths
        )
        shared.release()
        dsink = None
        if x.sink is not None:
            dsink = sink_gradient(x.sink, [part.of(scratch) for part in self._of_rows], self._head_axis)
        return Grads(dq, dk, dv, None, dsink)


class _Workspace:
    """What the kernels hand each other, of rows that are padded to whole tiles, and where it lies."""

    def __init__(self, p: Problem, device: Any, dq: Result, delta: Result, flags: int, use_pdl: bool) -> None:
        widest = max(p.dim, p.dim_v)
        self.config, self.width, self.columns = tuning.backward(widest), max(64, block(widest)), p.heads * p.q.shape[0]
        self.pads = count_tiles(p, p.n_q, p.q.shape[2], self.config.keys)
        self.padded = self.pads * self.config.keys
        self.k_tiles = count_tiles(p, p.n_k, p.k.shape[2], self.config.keys)
        self.rows_shape = (2, p.q.shape[0], p.heads, self.padded)  # lse in base 2 and delta, side by side for one copy
        self.size = self.columns * self.padded * self.width  # of dQ
        scratch = Scratch(SCRATCH.place, device)
        self.total = scratch.part((self.size,), torch.float32)
        log2, of_delta, tops = (scratch.part(delta.shape, torch.float32) for _ in range(3))
        self.of_rows = log2, of_delta, tops
        self.flags = scratch.part((flags,), torch.int32)
        self.turns = scratch.part((self.size // 4096,), torch.int32) if p.deterministic else None
        by_head = use_pdl and not p.packed  # heads of packed sequences have no number of tasks of their own
        self.complete = scratch.part((p.kv_heads * p.q.shape[0],), torch.int32) if by_head else None
        # No one has a use for the memory of dQ before the kernel is done, nor for these statistics after it.
        lent, of_dq = 2 * self.columns * self.padded * 4, dq.numel * ITEMSIZE[p.dtype]
        self.rows = DQ._replace(make=_as_rows) if of_dq >= lent else scratch.part(self.rows_shape, torch.float32)
        # Heads whose dQ waits for all of the kernel: those whose memory is lent, and one in any case (pdl.py).
        self.at_once = max(1, -(-self.columns * lent // max(1, of_dq))) if by_head else self.columns
        self.maker = scratch.maker()


def _as_rows(dq: Any) -> Any:
    """Its memory as statistics."""
    return dq.view(torch.float32)


def _begin(p: Problem, space: _Workspace, given: dict[int, Strides], use_pdl: bool) -> BoundLaunch:
    """Statistics of rows, and a dQ of 0. given: strides of what it reads and of delta."""
    start = KernelLaunch(
        begin_kernel,
        space.pads * space.columns,
        {"num_warps": 8},
        given,
        GROUP=p.group,
        DIM_V=p.dim_v,
        BLOCK_DV=block(p.dim_v),
        BLOCK_D=space.width,
        PAD=space.config.keys,
        LARGE=LARGE[p.accumulator],
        PDL=use_pdl,
    )
    where = (DOUT, OUT, LSE, DLSE, space.rows, *space.of_rows, space.total, space.turns, space.complete, LENGTHS)
    return start, (*where, space.pads, p.heads, space.padded, space.columns)


def _finish(p: Problem, space: _Workspace, dq: Result, flags: Argument, use_pdl: bool) -> BoundLaunch:
    """dQ in its dtype. flags: those of its tiles."""
    tiles = count_tiles(p, p.n_q, p.q.shape[2], ROWS)
    start = KernelLaunch(
        finish_kernel,
        tiles * space.columns,
        pdl_options(use_pdl),
        present(None, dq.strides),
        GROUP=p.group,
        DIM=p.dim,
        BLOCK_D=space.width,
        PAD=space.config.keys,
        PDL=use_pdl,
    )
    where = (space.total, DQ, flags, space.complete, bits(p.scale), LENGTHS)
    adders = 2 * space.k_tiles  # two warps of each task
    return start, (*where, tiles, p.heads, space.padded, space.columns, space.at_once, adders)


def _blocks(p: Problem, space: _Workspace, dout: Any, dk: Result, dv: Result) -> list[Maker]:
    """What makes the descriptors of the kernel's first arguments."""
    width, (batch, n_keys) = space.width, (p.k.shape[0], p.k.shape[2])
    q_box, k_box = ([1, 1, n, width] for n in (space.config.block_q, space.config.keys))
    out_box = [1, 1, ROWS, min(width, 128)]  # what a warpgroup has
    rows = torch.empty(space.rows_shape, dtype=torch.float32, device="meta")
    total = torch.empty((space.size // 256, 256), dtype=torch.float32, device="meta")
    return [
        descriptor_maker(p.q, q_box),
        descriptor_maker(p.k, k_box),
        descriptor_maker(p.v, k_box),
        descriptor_maker(dout, q_box),
        descriptor_maker(rows, [2, 1, 1, space.config.block_q], swizzled=False),
        descriptor_maker(total, [16, 256], swizzled=False),
        descriptor_maker(outline_of(dk, batch, p.kv_heads, n_keys, p.dim), out_box),
        descriptor_maker(outline_of(dv, batch, p.kv_heads, n_keys, p.dim_v), out_box),
    ]


def _persistent(config: tuning.BackwardConfig) -> bool:
    """Wide gradients leave by the buffers of queries, which a next task would fill."""
    return config.keys > ROWS


def constants(p: Problem, config: tuning.BackwardConfig, width: int, same_starts: bool) -> Constants:
    """same_starts: packed queries and keys begin at the same places."""
    always_cut = tuning.always_cut(p, same_starts)
    a_rule = rule(p)
    sizes = (p.group, p.dim, p.dim_v, width, config.block_q, config.keys, config.dout_stages)
    ends = p.packed or p.kv_lengths is not None
    cut = (always_cut, a_rule.right is not None and not always_cut, a_rule.left is not None)
    dq = (config.block_q * width // (2 * 64 * 64), config.dq_buffers, config.scores_first)
    out_tiles = 2 * config.dq_buffers * 64 * 64 * 4 // (ROWS * width * 2)
    return Constants(*map(gl.constexpr, (*sizes, *dq, p.packed, ends, *cut, _persistent(config), out_tiles)))
