"""The launches of a forward pass: how it is shared out among programs, who recomputes rows, and who merges shares."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import block, constants, lengths, lengths_of, rule, rule_of
from flashtile.backends.gpu.config import Config
from flashtile.backends.gpu.kernel_launch import Argument, BoundLaunch, KernelLaunch, LaunchSequence
from flashtile.backends.gpu.nonfinite import RecomputeForward, careful
from flashtile.backends.gpu.pdl import supports_pdl
from flashtile.backends.gpu.tensors import Result, count_tiles, descriptor_maker, strides
from flashtile.backends.triton import tuning
from flashtile.backends.triton.forward_kernel import forward_kernel
from flashtile.backends.triton.merge_kernel import merge_kernel
from flashtile.inputs import Inputs
from flashtile.problem import Problem

MOST_SPLITS = 64
# The values of a forward pass. A part is what a program makes of its share of the keys; of all keys, it is the result.
Q, K, V, OUT, LSE, PART, PART_LSE, FLAGS, SINK, RULE, LENGTHS = map(Argument, range(11))


class Forward:
    """The launches of a forward pass."""

    def __init__(self, p: Problem, device: Any, is_aligned: dict[str, bool]) -> None:
        self._out = Result(p, p.heads, p.q.shape[2], p.dim_v, p.out_dtype, device)
        self._lse = Result(p, p.heads, p.q.shape[2], None, p.accumulator, device)
        self._rule, self._lengths = rule(p), lengths(p)
        work = _share_out(p, device)
        self._splits = work.splits
        # Where each has a processor to itself, a program that recomputes its own rows is done sooner than another launch.
        # Where keys are split, it has to, however many share a processor: only it knows its share, and a row that was
        # made anew as a whole would be none of the parts that are merged.
        inside = work.splits > 1 or work.programs <= gpu.processors(device)
        use_pdl = not inside and supports_pdl(device)
        self._recompute = None
        if not inside:
            block_q, packed_heads = work.config.block_q, work.packed_heads
            self._recompute = RecomputeForward(p, device, self._out, self._lse, block_q, packed_heads, use_pdl)
        self._start = self._kernel(p, work, is_aligned, inside, use_pdl)
        between = (self._out.numel, self._lse.numel) if work.splits > 1 else (0, 0)  # parts of neighbouring shares
        where = (Q, K, V, K, V, PART, PART_LSE, SINK, FLAGS, RULE, LENGTHS)
        steps: list[BoundLaunch] = [(self._start, (*where, work.tiles, work.heads, *between))]
        if self._recompute is not None:
            steps.append(self._recompute.step(Q, K, V, OUT, LSE, SINK, FLAGS, RULE, LENGTHS))
        if work.splits > 1:
            real = getattr(torch, p.accumulator)
            self._part = self._out.parts(work.splits, dtype=real)
            self._part_lse = self._lse.parts(2 * work.splits, dtype=real)
            merge = self._merge(p, work.splits, real.itemsize)
            steps.append((merge, (PART, PART_LSE, OUT, LSE, *between, p.q.shape[2], p.heads)))
        self._launch = LaunchSequence(*steps)

    def _kernel(
        self, p: Problem, work: _Shares, is_aligned: dict[str, bool], inside: bool, use_pdl: bool
    ) -> KernelLaunch:
        """inside: each program recomputes its own rows."""
        config = work.config
        q, k, v = (strides(x, p) for x in (p.q, p.k, p.v))
        return KernelLaunch(
            forward_kernel,
            work.programs,
            config.options,
            {0: q, 1: k, 2: v, 5: self._out.strides, 6: self._lse.strides},
            {
                n: descriptor_maker(x, is_aligned[name], config, config.block_k)
                for n, name, x in ((3, "k", p.k), (4, "v", p.v))
            },
            PACKED_HEADS=work.packed_heads,
            SPLITS=work.splits,
            C=constants(p, config),
            RECOMPUTE=constants(p, careful(p, config.block_q, config.block_k)) if inside else None,
            PDL=use_pdl,
        )

    def _merge(self, p: Problem, splits: int, itemsize: int) -> KernelLaunch:
        """Of so many parts, whose numbers have so many bytes."""
        return KernelLaunch(
            merge_kernel,
            p.q.shape[0] * p.heads * p.q.shape[2],
            {"num_warps": tuning.merge_warps(splits * block(p.dim_v) * itemsize)},
            rows=dict(enumerate(2 * (self._out.strides, self._lse.strides))),
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            DIM_V=p.dim_v,
            BLOCK_DV=block(p.dim_v),
        )

    def __call__(self, x: Inputs, with_lse: bool) -> tuple[Any, Any]:
        out, lse = self._out.empty(), self._lse.empty() if with_lse else self._lse.discard_buffer()
        if self._out.numel == 0:
            return out, lse
        part, part_lse = (out, lse) if self._splits == 1 else (self._part(), self._part_lse())
        flags = None if self._recompute is None else self._recompute.make()
        a_rule, a_lengths = rule_of(self._rule, x), lengths_of(self._lengths, x)
        self._launch(x.q, x.k, x.v, out, lse, part, part_lse, flags, x.sink, a_rule, a_lengths)
        return out, lse


class _Shares(NamedTuple):
    """How a forward pass is shared out among programs."""

    config: Config
    packed_heads: int  # query heads whose rows share a tile
    tiles: int  # of one head, or of those that share them
    heads: int  # those that share tiles are one
    splits: int  # shares of the keys
    programs: int


def _share_out(p: Problem, device: Any) -> _Shares:
    architecture = gpu.architecture(device)
    config, packed_heads = tuning.forward(p, architecture)
    tiles, heads = count_tiles(p, p.n_q * packed_heads, p.q.shape[2], config.block_q), p.heads // packed_heads
    programs = tiles * heads * p.q.shape[0]
    splits = _splits(p, programs, config, device)
    if splits > 1 and p.n_k <= tuning.FEW_KEYS * splits:
        config, _ = tuning.forward(p, architecture, short=True)  # a tile has all rows of a decode, whichever it is
        splits = _splits(p, programs, config, device)
    return _Shares(config, packed_heads, tiles, heads, splits, splits * programs)


def _splits(p: Problem, programs: int, config: Config, device: Any) -> int:
    """Shares of the keys, where queries alone leave processors idle. By shape and device only: bits stay the same.

    A power of two: each number of shares is a kernel of its own.
    """
    room = config.programs * gpu.processors(device)
    wanted = min(room // max(programs, 1), MOST_SPLITS, p.n_k // (4 * config.block_k))
    return 1 << max(wanted, 1).bit_length() - 1
