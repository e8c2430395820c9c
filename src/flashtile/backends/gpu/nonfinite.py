"""The launches that recompute tiles with NaN or Inf in their sums, for a forward and for a backward pass."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.backends.gpu import config as tiles
from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import constants, precision
from flashtile.backends.gpu.config import Config
from flashtile.backends.gpu.kernel_launch import Argument, BoundLaunch, KernelLaunch, Strides
from flashtile.backends.gpu.nonfinite_kernels import (
    recompute_backward_kernel,
    recompute_forward_kernel,
    recompute_sums_kernel,
)
from flashtile.backends.gpu.pdl import pdl_options
from flashtile.backends.gpu.tensors import Result, count_tiles, empty, strides
from flashtile.problem import Problem


class NonfiniteFlags:
    """One int32 for each tile, and the number of programs that read them: enough to fill the GPU if all are set."""

    __slots__ = ("count", "make", "programs")

    def __init__(self, count: int, device: Any) -> None:
        self.count = count
        self.programs = min(count, 2 * gpu.processors(device))
        self.make = empty((count,), torch.int32, device)


class RecomputeForward:
    """The launch that recomputes flagged tiles of a forward pass, whichever kernel made them.

    A tile is block_q rows of a head. With packed_heads, that many heads share its rows and count as one: row r is of
    query r // packed_heads. The forward kernel writes a flag, 0 or 1, for each tile, in the order that
    nonfinite_kernels.py describes. use_pdl: it launches its dependents early (pdl.py).
    """

    def __init__(
        self, p: Problem, device: Any, out: Result, lse: Result, block_q: int, packed_heads: int, use_pdl: bool
    ) -> None:
        n_rows, batch = p.q.shape[2], p.q.shape[0]
        tiles, heads = count_tiles(p, p.n_q * packed_heads, n_rows, block_q), p.heads // packed_heads
        flags = NonfiniteFlags(tiles * heads * batch, device)
        self.count, self.make = flags.count, flags.make  # not cleared: all are written, even for a tile of no rows
        self._counts = {"count": flags.count, "tiles": tiles, "heads": heads}
        config = careful(p, block_q)
        self._launch = KernelLaunch(
            recompute_forward_kernel,
            flags.programs,
            config.options | pdl_options(use_pdl),
            {"q": strides(p.q, p), "k": strides(p.k, p), "v": strides(p.v, p), "out": out.strides, "lse": lse.strides},
            ROWS=block_q,
            PACKED_HEADS=packed_heads,
            C=constants(p, config),
            PDL=use_pdl,
        )

    def bind(self, **arguments: Argument) -> BoundLaunch:
        """arguments: those of recompute_forward_kernel that are values of a call."""
        return self._launch.bind(**arguments, **self._counts)


class RecomputeBackward:
    """The launches that recompute flagged tiles of a backward pass: dK and dV of block_k keys, dQ of block_q queries.

    The flags of all key tiles come first, those of query tiles from first_of_queries on. dout: its strides; statistics:
    those of log2, delta and tops (row_statistics()); row_cuts: those of the table that spans need, for tiles of cut_q
    queries and block_k keys (dkdv_rows()). lse: its strides, if it may be that of more keys. use_pdl: the kernel before
    them launches its dependents early, see pdl.py.
    """

    def __init__(
        self,
        p: Problem,
        device: Any,
        block_q: int,
        block_k: int,
        dout: Strides,
        statistics: Strides,
        grads: tuple[Result, ...],
        use_pdl: bool,
        row_cuts: Strides | None = None,
        cut_q: int = 32,
        lse: Strides | None = None,
    ) -> None:
        batch = p.q.shape[0]
        k_tiles, q_tiles = count_tiles(p, p.n_k, p.k.shape[2], block_k), count_tiles(p, p.n_q, p.q.shape[2], block_q)
        self.first_of_queries = k_tiles * p.kv_heads * batch
        flags = NonfiniteFlags(self.first_of_queries + q_tiles * p.heads * batch, device)
        self.count = flags.count  # flags that need not be cleared, as in RecomputeForward
        inputs = {"q": strides(p.q, p), "k": strides(p.k, p), "log2": statistics, "tops": statistics}
        self._q_counts = {"q_tiles": q_tiles, "heads": p.heads}
        self._k_counts = {"k_tiles": k_tiles, "kv_heads": p.kv_heads}
        of_queries, of_keys = careful(p, block_q), careful(p, block_k, cut_q)
        self._sums = KernelLaunch(
            recompute_sums_kernel,
            flags.programs,
            of_queries.options | pdl_options(use_pdl),
            inputs | {"lse": lse},
            ROWS=block_q,
            C=constants(p, of_queries),
            PDL=use_pdl,
        )
        of_keys = of_keys._replace(block_q=of_keys.block_k, block_k=of_keys.block_q)
        results = {name: x.strides for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}
        self._launch = KernelLaunch(
            recompute_backward_kernel,
            flags.programs,
            min(of_queries, of_keys, key=lambda config: config.warps).options | pdl_options(use_pdl),
            inputs | {"v": strides(p.v, p), "dout": dout, "delta": statistics, "row_cuts": row_cuts} | results,
            K_ROWS=block_k,
            Q_ROWS=block_q,
            CUT_Q=cut_q,
            OF_KEYS=constants(p, of_keys),
            OF_QUERIES=constants(p, of_queries),
            PDL=use_pdl,
        )

    def bind(
        self,
        *,
        v: Argument,
        dout: Argument,
        delta: Argument,
        dq: Argument,
        dk: Argument,
        dv: Argument,
        p_sink: Argument,
        row_cuts: Argument | None = None,
        lse: Argument | None = None,
        **shared: Argument,
    ) -> list[BoundLaunch]:
        """shared: the values of a call that both kernels take."""
        first = self.first_of_queries
        tiles, heads = self._q_counts["q_tiles"], self._q_counts["heads"]
        sums = {"first_of_queries": first, "count": self.count - first, "tiles": tiles, "heads": heads}
        gradients = {"v": v, "dout": dout, "delta": delta, "dq": dq, "dk": dk, "dv": dv, "row_cuts": row_cuts}
        counts = {"first_of_queries": first, "count": self.count, **self._q_counts, **self._k_counts}
        return [
            self._sums.bind(**shared, lse=lse, p_sink=p_sink, **sums),
            self._launch.bind(**shared, **gradients, **counts),
        ]


def careful(p: Problem, rows: int, walked: int = 32) -> Config:
    """The careful walk's tile for recomputing `rows` rows, in a kernel whose tiles have `walked` columns."""
    return tiles.careful(p.dim, p.dim_v, p.q.element_size(), precision(p) != "tf32", rows, walked)
