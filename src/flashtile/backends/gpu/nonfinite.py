"""The launches that make spoiled tiles anew, those of a forward and those of a backward pass."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends.gpu import config as tiles
from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import constants, precision
from flashtile.backends.gpu.config import Config
from flashtile.backends.gpu.kernel_launch import Argument, BoundLaunch, KernelLaunch, Strides, present
from flashtile.backends.gpu.nonfinite_kernels import (
    recompute_backward_kernel,
    recompute_forward_kernel,
    recompute_sums_kernel,
)
from flashtile.backends.gpu.pdl import pdl_options
from flashtile.backends.gpu.tensors import Result, count_tiles, empty, strides
from flashtile.problem import Problem


class NonfiniteFlags:
    """One int32 a tile, and the programs that look at them: enough to fill the GPU where all are set."""

    __slots__ = ("count", "make", "programs")

    def __init__(self, count: int, device: Any) -> None:
        self.count = count
        self.programs = min(count, 2 * gpu.processors(device))
        self.make = empty((count,), torch.int32, device)


class RecomputeForward:
    """The launch that makes spoiled tiles of a forward pass anew, whichever kernel made them.

    A tile is block_q rows of a head. With packed_heads they are of so many heads, row r of query r // packed_heads, and
    these heads count as one. That kernel writes a flag for each tile, 0 or 1: nonfinite_kernels.py says where. use_pdl:
    it also leads (pdl.py).
    """

    def __init__(
        self, p: Problem, device: Any, out: Result, lse: Result, block_q: int, packed_heads: int, use_pdl: bool
    ) -> None:
        n_rows, batch = p.q.shape[2], p.q.shape[0]
        tiles, heads = count_tiles(p, p.n_q * packed_heads, n_rows, block_q), p.heads // packed_heads
        flags = NonfiniteFlags(tiles * heads * batch, device)
        self.count, self.make = flags.count, flags.make  # not cleared: each tile's is written, also of one of no rows
        self._counts = (tiles, heads)
        config = careful(p, block_q)
        self._start = KernelLaunch(
            recompute_forward_kernel,
            flags.programs,
            config.options | pdl_options(use_pdl),
            dict(enumerate((*(strides(x, p) for x in (p.q, p.k, p.v)), out.strides, lse.strides))),
            ROWS=block_q,
            PACKED_HEADS=packed_heads,
            C=constants(p, config),
            PDL=use_pdl,
        )

    def step(
        self,
        q: Argument,
        k: Argument,
        v: Argument,
        out: Argument,
        lse: Argument,
        sink: Argument,
        flags: Argument,
        a_rule: Argument,
        a_lengths: Argument,
    ) -> BoundLaunch:
        return self._start, (q, k, v, out, lse, sink, flags, self.count, a_rule, a_lengths, *self._counts)


class RecomputeBackward:
    """The launch that makes spoiled tiles of a backward pass anew: dK and dV of block_k keys, dQ of block_q queries.

    The flags of all tiles of keys come first; those of tiles of queries begin at first_of_queries. given: strides of
    dout and of what row_statistics() made of each row, log2, delta and tops. use_pdl: as the kernel before it says
    (pdl.py).
    """

    def __init__(
        self,
        p: Problem,
        device: Any,
        block_q: int,
        block_k: int,
        given: tuple[Strides, ...],
        grads: tuple[Result, ...],
        use_pdl: bool,
    ) -> None:
        batch = p.q.shape[0]
        k_tiles, q_tiles = count_tiles(p, p.n_k, p.k.shape[2], block_k), count_tiles(p, p.n_q, p.q.shape[2], block_q)
        self.first_of_queries = k_tiles * p.kv_heads * batch
        flags = NonfiniteFlags(self.first_of_queries + q_tiles * p.heads * batch, device)
        self.count = flags.count  # of flags that need not be cleared, as in RecomputeForward
        q, k, v = (strides(x, p) for x in (p.q, p.k, p.v))
        self._counts = (k_tiles, p.kv_heads, q_tiles, p.heads)
        of_queries, of_keys = careful(p, block_q), careful(p, block_k)
        self._sums = KernelLaunch(
            recompute_sums_kernel,
            flags.programs,
            of_queries.options | pdl_options(use_pdl),
            present(q, k, given[1], given[3]),
            ROWS=block_q,
            C=constants(p, of_queries),
            PDL=use_pdl,
        )
        of_keys = of_keys._replace(block_q=of_keys.block_k, block_k=of_keys.block_q)
        self._start = KernelLaunch(
            recompute_backward_kernel,
            flags.programs,
            min(of_queries, of_keys, key=lambda config: config.warps).options | pdl_options(use_pdl),
            present(q, k, v, *given, *(x.strides for x in grads)),
            K_ROWS=block_k,
            Q_ROWS=block_q,
            OF_KEYS=constants(p, of_keys),
            OF_QUERIES=constants(p, of_queries),
            PDL=use_pdl,
        )

    def steps(
        self,
        q: Argument,
        k: Argument,
        v: Argument,
        dout: Argument,
        log2: Argument,
        delta: Argument,
        tops: Argument,
        dq: Argument,
        dk: Argument,
        dv: Argument,
        sink: Argument,
        flags: Argument,
        a_rule: Argument,
        a_lengths: Argument,
    ) -> list[BoundLaunch]:
        first, rules = self.first_of_queries, (a_rule, a_lengths)
        of_rows = (q, k, log2, tops, sink, flags, first, self.count - first)
        of_tiles = (q, k, v, dout, log2, delta, tops, dq, dk, dv, flags, self.count, first)
        return [
            (self._sums, (*of_rows, *rules, *self._counts[2:])),
            (self._start, (*of_tiles, *rules, *self._counts)),
        ]


def careful(p: Problem, rows: int, walked: int = 32) -> Config:
    """Of the careful walk that makes a tile of so many rows anew, within a kernel whose tiles have `walked` columns."""
    return tiles.careful(p.dim, p.dim_v, p.q.element_size(), precision(p) != "tf32", rows, walked)
