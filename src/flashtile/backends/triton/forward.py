"""The launches of a forward pass: its division among programs, recomputed rows, and the merge of split keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import block, constants, is_fixed, lengths, lengths_of, rule, rule_of
from flashtile.backends.gpu.config import Config
from flashtile.backends.gpu.kernel_launch import Argument, KernelLaunch, LaunchSequence
from flashtile.backends.gpu.nonfinite import RecomputeForward, careful
from flashtile.backends.gpu.pdl import supports_pdl
from flashtile.backends.gpu.tensors import Result, count_tiles, descriptor_maker, strides
from flashtile.backends.triton import tuning
from flashtile.backends.triton.forward_kernel import forward_kernel
from flashtile.backends.triton.merge_kernel import merge_kernel
from flashtile.inputs import Inputs
from flashtile.problem import Problem

MAX_SPLITS = 64
# The values of a forward pass. A part is the result of a share of the keys; of all keys, it is the output.
Q, K, V, OUT, LSE, PART, PART_LSE, FLAGS, SINK, RULE, LENGTHS = map(Argument, range(11))


class Forward:
    """The launches of a forward pass."""

    def __init__(self, p: Problem, device: Any, is_aligned: dict[str, bool]) -> None:
        self._out = Result(p, p.heads, p.q.shape[2], p.dim_v, p.out_dtype, device, p.q)
        self._lse = Result(p, p.heads, p.q.shape[2], None, p.accumulator, device)
        self._rule, self._lengths, self._is_fixed = rule(p), lengths(p), is_fixed(p)
        self._index = gpu.index_of(device)
        work = _divide(p, device)
        self._splits = work.splits
        # If each program has a processor to itself, recomputing its own rows is faster than another launch. If keys are
        # split, it has to do so in any case: only the program knows its share, and a row recomputed from all keys would
        # be none of the parts that are merged.
        in_kernel = work.splits > 1 or work.programs <= gpu.processors(device)
        use_pdl = not in_kernel and supports_pdl(device)
        self._recompute = None
        if not in_kernel:
            block_q, packed_heads = work.config.block_q, work.packed_heads
            self._recompute = RecomputeForward(p, device, self._out, self._lse, block_q, packed_heads, use_pdl)
        self._kernel = self._forward_launch(p, work, is_aligned, in_kernel, use_pdl)
        # Elements from the part of one share to that of the next.
        out_split, lse_split = (self._out.numel, self._lse.numel) if work.splits > 1 else (0, 0)
        inputs = {"q": Q, "k": K, "v": V, "p_sink": SINK, "flags": FLAGS, "rule": RULE, "lengths": LENGTHS}
        counts = {"tiles": work.tiles, "heads": work.heads, "out_split": out_split, "lse_split": lse_split}
        launches = [self._kernel.bind(**inputs, k_desc=K, v_desc=V, out=PART, lse=PART_LSE, **counts)]
        if self._recompute is not None:
            launches.append(self._recompute.bind(**inputs, out=OUT, lse=LSE))
        if work.splits > 1:
            real = getattr(torch, p.accumulator)
            self._part = self._out.parts(work.splits, dtype=real)
            self._part_lse = self._lse.parts(2 * work.splits, dtype=real)
            merge = self._merge_launch(p, work.splits, real.itemsize)
            counts = {"part_split": out_split, "lse_split": lse_split, "n_rows": p.q.shape[2], "n_heads": p.heads}
            launches.append(merge.bind(part=PART, part_lse=PART_LSE, out=OUT, lse=LSE, **counts))
        self._launch = LaunchSequence(*launches)

    def _forward_launch(
        self, p: Problem, work: _Shares, is_aligned: dict[str, bool], in_kernel: bool, use_pdl: bool
    ) -> KernelLaunch:
        """in_kernel: each program recomputes its own rows."""
        config = work.config
        inputs = {name: strides(x, p) for name, x in (("q", p.q), ("k", p.k), ("v", p.v))}
        return KernelLaunch(
            forward_kernel,
            work.programs,
            config.options,
            inputs | {"out": self._out.strides, "lse": self._lse.strides},
            {
                "k_desc": descriptor_maker(p.k, is_aligned["k"], config, config.block_k),
                "v_desc": descriptor_maker(p.v, is_aligned["v"], config, config.block_k),
            },
            PACKED_HEADS=work.packed_heads,
            SPLITS=work.splits,
            C=constants(p, config),
            RECOMPUTE=constants(p, careful(p, config.block_q, config.block_k)) if in_kernel else None,
            PDL=use_pdl,
        )

    def _merge_launch(self, p: Problem, splits: int, itemsize: int) -> KernelLaunch:
        """itemsize: bytes of a number of the parts."""
        out, lse = self._out.strides, self._lse.strides
        return KernelLaunch(
            merge_kernel,
            p.q.shape[0] * p.heads * p.q.shape[2],
            {"num_warps": tuning.merge_warps(splits * block(p.dim_v) * itemsize)},
            {"part": out, "part_lse": lse, "out": out, "lse": lse},
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            DIM_V=p.dim_v,
            BLOCK_DV=block(p.dim_v),
        )

    def __call__(self, x: Inputs, with_lse: bool = True) -> tuple[Any, Any]:
        if not (self._index is None or self._index == gpu.current()):
            return gpu.on_device(self._index, self, x, with_lse)
        out, lse = self._out.empty(), self._lse.empty() if with_lse else self._lse.discarded
        if lse is None:
            lse = self._lse.discard_buffer()
        if self._out.numel == 0:
            return out, lse
        part, part_lse = (out, lse) if self._splits == 1 else (self._part(), self._part_lse())
        flags = None if self._recompute is None else self._recompute.make()
        a_rule, a_lengths = self._rule, self._lengths
        if not self._is_fixed:
            a_rule, a_lengths = rule_of(a_rule, x), lengths_of(a_lengths, x)
        self._launch(x.q, x.k, x.v, out, lse, part, part_lse, flags, x.sink, a_rule, a_lengths)
        return out, lse


class _Shares(NamedTuple):
    """How a forward pass is divided among programs."""

    config: Config
    packed_heads: int  # query heads that share the rows of a tile
    tiles: int  # of one head, or of the heads that share them
    heads: int  # packed heads count as one
    splits: int  # shares of the keys
    programs: int


def _divide(p: Problem, device: Any) -> _Shares:
    architecture = gpu.architecture(device)
    config, packed_heads = tuning.forward(p, architecture)
    tiles, heads = count_tiles(p, p.n_q * packed_heads, p.q.shape[2], config.block_q), p.heads // packed_heads
    programs = tiles * heads * p.q.shape[0]
    splits = _splits(p, programs, config, device)
    if splits > 1 and p.n_k <= tuning.FEW_KEYS * splits:
        config, _ = tuning.forward(p, architecture, short=True)  # either tile holds all rows of a decode
        splits = _splits(p, programs, config, device)
    return _Shares(config, packed_heads, tiles, heads, splits, splits * programs)


def _splits(p: Problem, programs: int, config: Config, device: Any) -> int:
    """The number of shares of the keys, more than 1 if queries alone leave processors idle.

    It depends on shape and device only, so that results keep their bits. It is a power of two, because each number
    needs a kernel of its own.
    """
    available = config.programs * gpu.processors(device)
    wanted = min(available // max(programs, 1), MAX_SPLITS, p.n_k // (4 * config.block_k))
    return 1 << max(wanted, 1).bit_length() - 1
