"""The launches of a backward pass: statistics of rows, dK and dV, dQ, what is to be recomputed, dbias."""

from __future__ import annotations

from typing import Any

import torch
import triton

from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import ALIGNED, block, constants, lengths, lengths_of, pairs, rule, rule_of
from flashtile.backends.gpu.backward_rows import LARGE
from flashtile.backends.gpu.config import Config
from flashtile.backends.gpu.kernel_launch import Argument, BoundLaunch, KernelLaunch, LaunchSequence, present
from flashtile.backends.gpu.nonfinite import RecomputeBackward
from flashtile.backends.gpu.pdl import pdl_options, supports_pdl
from flashtile.backends.gpu.scratch import Scratch
from flashtile.backends.gpu.sink import sink_gradient
from flashtile.backends.gpu.tensors import (
    Result,
    count_tiles,
    descriptor_maker,
    results,
    rounded,
    rounded_outline,
    strides,
)
from flashtile.backends.triton import tuning
from flashtile.backends.triton.backward_kernels import dbias_kernel, dkdv_kernel, dq_kernel, statistics_kernel
from flashtile.inputs import Inputs
from flashtile.problem import Problem
from flashtile.results import Grads

# The values of a backward pass.
Q, K, V, DOUT, OUT, LSE, DLSE, DQ, DK, DV, SCRATCH, SINK, RULE, LENGTHS, DBIAS = map(Argument, range(15))


class Backward:
    """The launches of a backward pass. `given`: outlines of dout, out, lse and dlse."""

    def __init__(
        self, p: Problem, device: Any, is_aligned: dict[str, bool], given: tuple[Any, ...], bias_grad: bool
    ) -> None:
        dout = rounded_outline(given[0], p)
        self._narrow = None if dout is given[0] else dout.dtype
        self._rule, self._lengths = rule(p), lengths(p)
        self._dq, self._dk, self._dv = grads = results(p, device)
        self._bias_shape = p.bias.shape if bias_grad and p.bias is not None else None
        self._real = getattr(torch, p.accumulator)
        # Each kernel relies on what the one before it has waited for, so none may be missing.
        use_pdl = supports_pdl(device) and all(x.numel for x in grads[:2])
        of_keys, of_queries = (_config(kernel, p, device) for kernel in ("dkdv", "dq"))
        scratch = Scratch(SCRATCH.place, device)
        rows = _Statistics(p, of_keys.block_q, scratch)
        self._of_rows, self._n = (rows.log2, rows.delta, rows.tops), p.q.shape[2]
        recompute_strides = (strides(dout, p), *3 * (rows.strides,))
        recompute = RecomputeBackward(p, device, of_queries.block_q, of_keys.block_k, recompute_strides, grads, use_pdl)
        flags = scratch.part((recompute.count,), torch.int32)
        self._scratch = scratch.maker()
        walks = _Walks(p, dout, is_aligned, rows, use_pdl)
        steps = list[BoundLaunch]()
        if self._dq.numel:
            steps.append(rows.step(p, device, (dout, *given[1:]), use_pdl))
        if self._dk.numel:
            steps.append(walks.dkdv(of_keys, grads[1:], flags))
        if self._dq.numel:
            steps.append(walks.dq(of_queries, grads[:1], flags, recompute.first_of_queries))
        if recompute.count:
            steps += recompute.steps(Q, K, V, DOUT, *self._of_rows, DQ, DK, DV, SINK, flags, RULE, LENGTHS)
        if self._bias_shape is not None and self._bias_shape.numel():
            steps.append(walks.dbias(_config("dbias", p, device), self._bias_shape))
        self._launch = LaunchSequence(*steps)

    def __call__(self, x: Inputs, *given: Any) -> Grads:
        if self._narrow is not None:
            given = (rounded(given[0], self._narrow), *given[1:])
        dq, dk, dv, scratch = self._dq.empty(), self._dk.empty(), self._dv.empty(), self._scratch()
        a_rule, a_lengths = rule_of(self._rule, x), lengths_of(self._lengths, x)
        dbias = of_bias = None
        if self._bias_shape is not None:
            dbias = x.q.new_zeros(self._bias_shape, dtype=self._real)
            of_bias = pairs(dbias)
        self._launch(x.q, x.k, x.v, *given, dq, dk, dv, scratch, x.sink, a_rule, a_lengths, of_bias)
        dsink = None
        if x.sink is not None:
            dsink = sink_gradient(x.sink, [part.of(scratch)[..., : self._n] for part in self._of_rows], heads=1)
        return Grads(dq, dk, dv, dbias, dsink)


class _Statistics:
    """What statistics_kernel makes of each row, in scratch memory: log2, delta and tops. tile: rows read at a time."""

    def __init__(self, p: Problem, tile: int, scratch: Scratch) -> None:
        # Rows side by side, with room for a whole tile where the last one begins. Multiples of ALIGNED, whatever the
        # length: there would be kernels for both kinds.
        unit = max(ALIGNED, tile)
        room = int(triton.cdiv(p.q.shape[2] + unit * p.packed, unit)) * unit
        shape, real = (p.q.shape[0], p.heads, room), getattr(torch, p.accumulator)
        self.strides = (0 if p.packed else p.heads * room, room, 1)
        self.log2, self.delta, self.tops = (scratch.part(shape, real) for _ in range(3))

    def step(self, p: Problem, device: Any, given: tuple[Any, ...], use_pdl: bool) -> BoundLaunch:
        of_given = (None if x is None else strides(x, p) for x in given)
        n_rows, block_rows = p.q.shape[2], tuning.statistics_rows(gpu.architecture(device))
        start = KernelLaunch(
            statistics_kernel,
            int(triton.cdiv(n_rows, block_rows)) * p.heads * p.q.shape[0],
            rows=present(*of_given, *3 * (self.strides,)),
            DIM_V=p.dim_v,
            BLOCK_DV=block(p.dim_v),
            BLOCK=block_rows,
            LARGE=LARGE[p.accumulator],
            PDL=use_pdl,
        )
        return start, (DOUT, OUT, LSE, DLSE, self.log2, self.delta, self.tops, n_rows, p.heads)


class _Walks:
    """The kernels that walk tiles of scores, and what all of them read: q, k, v, dout and the statistics of rows."""

    def __init__(self, p: Problem, dout: Any, is_aligned: dict[str, bool], rows: _Statistics, use_pdl: bool) -> None:
        self._p, self._is_aligned, self._rows, self._chained = p, is_aligned, rows, use_pdl
        self._tensors = {"q": p.q, "k": p.k, "v": p.v, "dout": dout}
        self._strides = [strides(x, p) for x in self._tensors.values()]

    def dkdv(self, config: Config, grads: tuple[Result, ...], flags: Argument) -> BoundLaunch:
        p, rows = self._p, self._rows
        tiles = count_tiles(p, p.n_k, p.k.shape[2], config.block_k)
        start = self._start(dkdv_kernel, config, tiles * p.kv_heads, ("q", "dout"), config.block_q, grads)
        where = (Q, DOUT, rows.log2, rows.delta, DK, DV, flags, RULE, LENGTHS)
        return start, (Q, K, V, DOUT, *where, tiles, p.kv_heads)

    def dq(self, config: Config, grads: tuple[Result, ...], flags: Argument, first_flag: int) -> BoundLaunch:
        p, rows = self._p, self._rows
        tiles = count_tiles(p, p.n_q, p.q.shape[2], config.block_q)
        start = self._start(dq_kernel, config, tiles * p.heads, ("k", "v"), config.block_k, grads)
        where = (K, V, rows.log2, rows.delta, DQ, flags, first_flag, RULE, LENGTHS)
        return start, (Q, K, V, DOUT, *where, tiles, p.heads)

    def _start(
        self, kernel: Any, config: Config, tiles: int, walked: tuple[str, str], width: int, grads: tuple[Result, ...]
    ) -> KernelLaunch:
        """Of a kernel that has so many tiles in a sequence, and fetches the two that it walks by blocks of `width`."""
        fetched = [descriptor_maker(self._tensors[name], self._is_aligned[name], config, width) for name in walked]
        of_rows = 2 * (self._rows.strides,)
        return KernelLaunch(
            kernel,
            tiles * self._p.q.shape[0],
            config.options | pdl_options(self._chained),
            present(*self._strides, None, None, *of_rows, *(x.strides for x in grads)),
            blocks=dict(enumerate(fetched, 4)),
            C=constants(self._p, config),
            PDL=self._chained,
        )

    def dbias(self, config: Config, shape: torch.Size) -> BoundLaunch:
        """It follows no other: it is launched when all before it is complete."""
        p, rows = self._p, self._rows
        sequences, heads, down, across = shape
        start = KernelLaunch(
            dbias_kernel,
            int(triton.cdiv(down, config.block_q) * triton.cdiv(across, config.block_k)) * sequences * heads,
            config.options,
            present(*self._strides, *3 * (rows.strides,)),
            SHARE_SEQUENCES=sequences == 1,
            SHARE_HEADS=heads == 1,
            SHARE_ROWS=down == 1,
            SHARE_KEYS=across == 1,
            C=constants(p, config),
        )
        where = (rows.log2, rows.delta, rows.tops, DBIAS, RULE, LENGTHS)
        return start, (Q, K, V, DOUT, *where, p.heads, down, across)


def _config(kernel: str, p: Problem, device: Any) -> Config:
    if kernel == "dbias":
        return tuning.DBIAS if max(p.dim, p.dim_v) <= 128 else tuning.DBIAS._replace(block_q=16)
    return tuning.choose(kernel, p.dim, p.dim_v, p.q.element_size(), gpu.architecture(device), *tuning.asks(p))
