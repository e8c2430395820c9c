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
from flashtile.backends.gpu.arguments import bits, block, is_fixed, lengths, lengths_of, rule, rule_of
from flashtile.backends.gpu.backward_rows import LARGE
from flashtile.backends.gpu.kernel_launch import Argument, BoundLaunch, KernelLaunch, LaunchSequence, Maker, Strides
from flashtile.backends.gpu.nonfinite import RecomputeBackward
from flashtile.backends.gpu.pdl import pdl_options, supports_pdl
from flashtile.backends.gpu.scratch import Scratch, tail
from flashtile.backends.gpu.sink import head_axis, sink_gradient
from flashtile.backends.gpu.tensors import Result, count_tiles, results, rounded, rounded_outline, strides
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.problem import Problem
from flashtile.results import Grads

# The values of a backward pass.
Q, K, V, DOUT, OUT, LSE, DLSE, DQ, DK, DV, SCRATCH, COUNTERS, SINK, RULE, LENGTHS = map(Argument, range(15))


class Constants(NamedTuple):
    """Compile-time constants of the kernel; every field is a constexpr."""

    GROUP: Any
    DIM: Any
    DIM_V: Any
    BLOCK_D: Any
    BLOCK_Q: Any
    KEYS: Any  # of a task
    DOUT_STAGES: Any
    PARTS: Any  # 64 x 64 tiles of dQ that a warpgroup computes for a tile of queries
    DQ_BUFFERS: Any  # of a warpgroup
    SCORES_FIRST: Any  # see tuning.BackwardConfig
    PACKED: Any
    ENDS: Any  # some keys of a tile may not be in use, though they are in memory
    ALWAYS_CUT: Any  # the number of first query tiles that are cut, for every tile of keys
    CUT_AT_BEGIN: Any  # tiles may be cut by the right limit of the band
    CUT_AT_END: Any  # tiles may be cut by the left limit of the band
    PERSISTENT: Any  # a program takes one task after the other
    OUT_TILES: Any  # tiles of dK or dV, each of a warpgroup, that all buffers of dQ can hold


class Backward:
    """Row statistics, the backward kernel, dQ in its dtype, and recomputed tiles.

    given: outlines of dout, out, lse and dlse. may_share: out and lse may be those of attention to more keys.
    """

    def __init__(self, p: Problem, device: Any, given: tuple[Any, ...], may_share: bool = False) -> None:
        self._device, self._packed, self._head_axis = device, p.packed, head_axis(p)
        dout = rounded_outline(given[0], p)
        self._dout_dtype = None if dout is given[0] else dout.dtype  # None: not rounded
        self._rule, self._lengths, self._is_fixed = rule(p), lengths(p), is_fixed(p)
        self._dq, self._dk, self._dv = grads = results(p, device)
        use_pdl = supports_pdl(device)
        delta = Result(p, p.heads, p.q.shape[2], None, "float32", device)
        lse = strides(given[2], p) if may_share else None
        recompute = RecomputeBackward(p, device, ROWS, ROWS, strides(dout, p), delta.strides, grads, use_pdl, lse=lse)
        space = _Workspace(p, device, self._dq, delta, recompute.count, use_pdl)
        self._statistics, self._flags, self._scratch = (*space.statistics.values(),), space.flags, space.maker
        given = (dout, *given[1:])
        names = ("dout", "out", "lse", "dlse")
        inputs = {name: None if x is None else strides(x, p) for name, x in zip(names, given, strict=True)}
        begin = _begin(p, space, inputs | dict.fromkeys(space.statistics, delta.strides), use_pdl)
        finish = _finish(p, space, self._dq, tail(space.flags, recompute.first_of_queries), use_pdl)
        inputs_of = {"q": Q, "k": K, "v": V, "dout": DOUT, "p_sink": SINK, "rule": RULE, "lengths": LENGTHS}
        recomputed = recompute.bind(
            **inputs_of, lse=LSE if may_share else None, **space.statistics, flags=space.flags, dq=DQ, dk=DK, dv=DV
        )
        descriptors = _descriptors(p, space, dout, *grads[1:])
        # Packed queries and keys that begin at the same positions, given as one tensor, have a diagonal each.
        self._launch = {
            same_starts: LaunchSequence(
                begin, self._kernel(p, space, descriptors, same_starts, use_pdl), finish, *recomputed
            )
            for same_starts in (False, True)
        }

    def _kernel(
        self, p: Problem, space: _Workspace, descriptors: dict[str, Maker], same_starts: bool, use_pdl: bool
    ) -> BoundLaunch:
        config, heads, processors = space.config, p.kv_heads * p.q.shape[0], gpu.processors(self._device)
        tasks = space.k_tiles * heads
        launch = KernelLaunch(
            backward_kernel,
            min(tasks, processors) if _persistent(config) else tasks,
            {"num_warps": 4} | pdl_options(use_pdl),
            {"dk": self._dk.strides, "dv": self._dv.strides},
            descriptors,
            C=constants(p, config, space.width, same_starts),
        )
        return launch.bind(
            q_desc=Q,
            k_desc=K,
            v_desc=V,
            dout_desc=DOUT,
            rows_desc=space.rows,
            dq_desc=space.total,
            dk_desc=DK,
            dv_desc=DV,
            dk=DK,
            dv=DV,
            flags=space.flags,
            counter=COUNTERS,
            turns=space.turns,
            complete=space.complete,
            rule=RULE,
            lengths=LENGTHS,
            tiles=space.k_tiles,
            kv_heads=p.kv_heads,
            section=tuning.section(p, space.k_tiles, heads, processors),
            padded=space.padded,
            flag_tiles=count_tiles(p, p.n_k, p.k.shape[2], ROWS),
            tasks=tasks,
        )

    def __call__(self, x: Inputs, *given: Any) -> Grads:
        if self._dout_dtype is not None:
            given = (rounded(given[0], self._dout_dtype), *given[1:])
        dq, dk, dv, scratch = self._dq.empty(), self._dk.empty(), self._dv.empty(), self._scratch()
        if self._packed:
            self._flags.of(scratch).zero_()  # flags of tiles that belong to no sequence are never written
        a_rule, a_lengths = self._rule, self._lengths
        if not self._is_fixed:
            a_rule, a_lengths = rule_of(a_rule, x), lengths_of(a_lengths, x)
        same_starts = x.cu_q is not None and x.cu_q.data_ptr() == x.cu_k.data_ptr()
        work = acquire_counters(self._device)
        self._launch[same_starts](x.q, x.k, x.v, *given, dq, dk, dv, scratch, work.counters, x.sink, a_rule, a_lengths)
        work.release()
        dsink = None
        if x.sink is not None:
            dsink = sink_gradient(x.sink, [part.of(scratch) for part in self._statistics], self._head_axis)
        return Grads(dq, dk, dv, None, dsink)


class _Workspace:
    """The memory that the kernels share, for rows that are padded to whole tiles of keys."""

    def __init__(self, p: Problem, device: Any, dq: Result, delta: Result, flags: int, use_pdl: bool) -> None:
        widest = max(p.dim, p.dim_v)
        self.config, self.width = tuning.backward(widest), max(64, block(widest))
        self.all_heads = p.heads * p.q.shape[0]
        self.padded_tiles = count_tiles(p, p.n_q, p.q.shape[2], self.config.keys)
        self.padded = self.padded_tiles * self.config.keys
        self.k_tiles = count_tiles(p, p.n_k, p.k.shape[2], self.config.keys)
        self.rows_shape = (2, p.q.shape[0], p.heads, self.padded)  # lse in base 2 and delta, fetched by one copy
        self.size = self.all_heads * self.padded * self.width  # of dQ
        scratch = Scratch(SCRATCH.position, device)
        self.total = scratch.part((self.size,), torch.float32)
        self.statistics = {name: scratch.part(delta.shape, torch.float32) for name in ("log2", "delta", "tops")}
        self.flags = scratch.part((flags,), torch.int32)
        self.turns = scratch.part((self.size // 4096,), torch.int32) if p.deterministic else None
        by_head = use_pdl and not p.packed  # heads of packed sequences have no fixed number of tasks
        self.complete = scratch.part((p.kv_heads * p.q.shape[0],), torch.int32) if by_head else None
        # The memory of the result dQ is unused until the kernel is done, and these statistics are unused after it.
        borrowed, dq_bytes = 2 * self.all_heads * self.padded * 4, dq.numel * ITEMSIZE[p.dtype]
        fits = dq_bytes >= borrowed
        self.rows = DQ._replace(view=_as_rows) if fits else scratch.part(self.rows_shape, torch.float32)
        # Heads whose dQ waits for the whole kernel: those whose memory is borrowed, and at least one (pdl.py).
        self.waiting_heads = max(1, -(-self.all_heads * borrowed // max(1, dq_bytes))) if by_head else self.all_heads
        self.maker = scratch.maker()


def _as_rows(dq: Any) -> Any:
    """The memory of dQ as statistics."""
    return dq.view(torch.float32).as_strided((dq.numel() // 2,), (1,))


def _begin(p: Problem, space: _Workspace, inputs: dict[str, Strides | None], use_pdl: bool) -> BoundLaunch:
    """Row statistics, and a dQ of 0. inputs: strides of what it reads and of the statistics."""
    launch = KernelLaunch(
        begin_kernel,
        space.padded_tiles * space.all_heads,
        {"num_warps": 8},
        inputs,
        GROUP=p.group,
        DIM_V=p.dim_v,
        BLOCK_DV=block(p.dim_v),
        BLOCK_D=space.width,
        PAD=space.config.keys,
        LARGE=LARGE[p.accumulator],
        PDL=use_pdl,
    )
    return launch.bind(
        dout=DOUT,
        out=OUT,
        lse=LSE,
        dlse=DLSE,
        rows=space.rows,
        **space.statistics,
        total=space.total,
        turns=space.turns,
        complete=space.complete,
        lengths=LENGTHS,
        tiles=space.padded_tiles,
        heads=p.heads,
        padded=space.padded,
        all_heads=space.all_heads,
    )


def _finish(p: Problem, space: _Workspace, dq: Result, flags: Argument, use_pdl: bool) -> BoundLaunch:
    """dQ in its dtype. flags: those of its tiles."""
    tiles = count_tiles(p, p.n_q, p.q.shape[2], ROWS)
    launch = KernelLaunch(
        finish_kernel,
        tiles * space.all_heads,
        pdl_options(use_pdl),
        {"dq": dq.strides},
        GROUP=p.group,
        DIM=p.dim,
        BLOCK_D=space.width,
        PAD=space.config.keys,
        PDL=use_pdl,
    )
    return launch.bind(
        total=space.total,
        dq=DQ,
        flags=flags,
        complete=space.complete,
        scale=bits(p.scale),
        lengths=LENGTHS,
        tiles=tiles,
        heads=p.heads,
        padded=space.padded,
        all_heads=space.all_heads,
        waiting_heads=space.waiting_heads,
        count=2 * space.k_tiles,  # two warps of each task
    )


def _descriptors(p: Problem, space: _Workspace, dout: Any, dk: Result, dv: Result) -> dict[str, Maker]:
    """What makes the descriptors of the kernel, by parameter."""
    width, (batch, n_keys) = space.width, (p.k.shape[0], p.k.shape[2])
    q_box, k_box = ([1, 1, n, width] for n in (space.config.block_q, space.config.keys))
    out_box = [1, 1, ROWS, min(width, 128)]  # the tile of a warpgroup
    rows = torch.empty(space.rows_shape, dtype=torch.float32, device="meta")
    total = torch.empty((space.size // 256, 256), dtype=torch.float32, device="meta")
    return {
        "q_desc": descriptor_maker(p.q, q_box),
        "k_desc": descriptor_maker(p.k, k_box),
        "v_desc": descriptor_maker(p.v, k_box),
        "dout_desc": descriptor_maker(dout, q_box),
        "rows_desc": descriptor_maker(rows, [2, 1, 1, space.config.block_q], swizzled=False),
        "dq_desc": descriptor_maker(total, [16, 256], swizzled=False),
        "dk_desc": descriptor_maker(outline_of(dk, batch, p.kv_heads, n_keys, p.dim), out_box),
        "dv_desc": descriptor_maker(outline_of(dv, batch, p.kv_heads, n_keys, p.dim_v), out_box),
    }


def _persistent(config: tuning.BackwardConfig) -> bool:
    """Over head dim 128 gradients leave by the query buffers, which the next task would fill."""
    return config.keys > ROWS


def constants(p: Problem, config: tuning.BackwardConfig, width: int, same_starts: bool) -> Constants:
    """same_starts: packed queries and keys begin at the same positions."""
    always_cut = tuning.always_cut(p, same_starts)
    a_rule = rule(p)
    sizes = (p.group, p.dim, p.dim_v, width, config.block_q, config.keys, config.dout_stages)
    ends = p.packed or p.kv_lengths is not None
    cut = (always_cut, a_rule.right is not None and not always_cut, a_rule.left is not None)
    dq = (config.block_q * width // (2 * 64 * 64), config.dq_buffers, config.scores_first)
    out_tiles = 2 * config.dq_buffers * 64 * 64 * 4 // (ROWS * width * 2)
    return Constants(*map(gl.constexpr, (*sizes, *dq, p.packed, ends, *cut, _persistent(config), out_tiles)))
