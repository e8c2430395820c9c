"""The launches of a backward pass: cuts of spans, row statistics, dK and dV, dQ, recomputed tiles, dbias."""

from __future__ import annotations

from typing import Any

import torch
import triton

from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import (
    ALIGNED,
    block,
    constants,
    is_fixed,
    lengths,
    lengths_of,
    pairs,
    rule,
    rule_of,
)
from flashtile.backends.gpu.backward_rows import LARGE
from flashtile.backends.gpu.config import Config
from flashtile.backends.gpu.kernel_launch import Argument, BoundLaunch, KernelLaunch, LaunchSequence, Maker, Strides
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
from flashtile.backends.triton.backward_kernels import (
    dbias_kernel,
    dkdv_kernel,
    dq_kernel,
    row_cuts_kernel,
    statistics_kernel,
)
from flashtile.inputs import Inputs
from flashtile.problem import Problem
from flashtile.results import Grads

# The values of a backward pass.
Q, K, V, DOUT, OUT, LSE, DLSE, DQ, DK, DV, SCRATCH, SINK, RULE, LENGTHS, DBIAS = map(Argument, range(15))


class Backward:
    """The launches of a backward pass. given: outlines of dout, out, lse and dlse. dtype: that of a Target, or None."""

    def __init__(
        self,
        p: Problem,
        device: Any,
        is_aligned: dict[str, bool],
        given: tuple[Any, ...],
        bias_grad: bool,
        dtype: str | None = None,
    ) -> None:
        dout = rounded_outline(given[0], p)
        self._dout_dtype = None if dout is given[0] else dout.dtype  # None: not rounded
        self._rule, self._lengths, self._is_fixed = rule(p), lengths(p), is_fixed(p)
        self._dq, self._dk, self._dv = grads = results(p, device, dtype)
        self._bias_shape = p.bias.shape if bias_grad and p.bias is not None else None
        self._real = getattr(torch, p.accumulator)
        # With PDL each kernel relies on what the one before it has waited for, so none may be missing.
        use_pdl = supports_pdl(device) and all(x.numel for x in grads[:2])
        of_keys, of_queries = (_config(kernel, p, device) for kernel in ("dkdv", "dq"))
        scratch = Scratch(SCRATCH.position, device)
        statistics = _Statistics(p, of_keys.block_q, scratch)
        self._statistics, self._n = (statistics.log2, statistics.delta, statistics.tops), p.q.shape[2]
        row_cuts = None if p.spans is None else _RowCuts(p, of_keys, scratch)
        recompute = RecomputeBackward(
            *(p, device, of_queries.block_q, of_keys.block_k),
            *(strides(dout, p), statistics.strides, grads, use_pdl),
            row_cuts=None if row_cuts is None else row_cuts.strides,
            cut_q=32 if row_cuts is None else of_keys.block_q,
            lse=None if dtype is None else strides(given[2], p),
        )
        flags = scratch.part((recompute.count,), torch.int32)
        self._scratch = scratch.maker()
        tiles = _TileKernels(p, dout, is_aligned, statistics, use_pdl)
        launches = list[BoundLaunch]()
        if row_cuts is not None and self._dq.numel and self._dk.numel:
            launches.append(row_cuts.bind())
        if self._dq.numel:
            launches.append(statistics.bind(p, device, (dout, *given[1:]), use_pdl))
        if self._dk.numel:
            launches.append(tiles.dkdv(of_keys, grads, flags, row_cuts))
        if self._dq.numel:
            launches.append(tiles.dq(of_queries, grads, flags, recompute.first_of_queries))
        if recompute.count:
            inputs = {"q": Q, "k": K, "v": V, "dout": DOUT, "p_sink": SINK, "rule": RULE, "lengths": LENGTHS}
            table = None if row_cuts is None else row_cuts.part
            lse = None if dtype is None else LSE
            inputs |= {**statistics.parts(), "flags": flags, "dq": DQ, "dk": DK, "dv": DV}
            launches += recompute.bind(**inputs, row_cuts=table, lse=lse)
        if self._bias_shape is not None and self._bias_shape.numel():
            launches.append(tiles.dbias(_config("dbias", p, device), self._bias_shape))
        self._launch = LaunchSequence(*launches)

    def __call__(self, x: Inputs, *given: Any) -> Grads:
        if self._dout_dtype is not None:
            given = (rounded(given[0], self._dout_dtype), *given[1:])
        dq, dk, dv, scratch = self._dq.empty(), self._dk.empty(), self._dv.empty(), self._scratch()
        a_rule, a_lengths = self._rule, self._lengths
        if not self._is_fixed:
            a_rule, a_lengths = rule_of(a_rule, x), lengths_of(a_lengths, x)
        dbias = dbias_pairs = None
        if self._bias_shape is not None:
            dbias = x.q.new_zeros(self._bias_shape, dtype=self._real)
            dbias_pairs = pairs(dbias)
        self._launch(x.q, x.k, x.v, *given, dq, dk, dv, scratch, x.sink, a_rule, a_lengths, dbias_pairs)
        dsink = None
        if x.sink is not None:
            dsink = sink_gradient(x.sink, [part.of(scratch)[..., : self._n] for part in self._statistics], heads=1)
        return Grads(dq, dk, dv, dbias, dsink)


class _Statistics:
    """The results of statistics_kernel in scratch memory: log2, delta and tops. tile: rows read at a time."""

    def __init__(self, p: Problem, tile: int, scratch: Scratch) -> None:
        # Contiguous rows, with space for a whole tile at the last one. Always a multiple of ALIGNED: otherwise there
        # would be two specialized kernels.
        unit = max(ALIGNED, tile)
        padded = int(triton.cdiv(p.q.shape[2] + unit * p.packed, unit)) * unit
        shape, real = (p.q.shape[0], p.heads, padded), getattr(torch, p.accumulator)
        self.strides = (0 if p.packed else p.heads * padded, padded, 1)
        self.log2, self.delta, self.tops = (scratch.part(shape, real) for _ in range(3))

    def parts(self) -> dict[str, Argument]:
        """The statistics by the names of kernel parameters."""
        return {"log2": self.log2, "delta": self.delta, "tops": self.tops}

    def bind(self, p: Problem, device: Any, given: tuple[Any, ...], use_pdl: bool) -> BoundLaunch:
        names = ("dout", "out", "lse", "dlse")
        inputs = {name: None if x is None else strides(x, p) for name, x in zip(names, given, strict=True)}
        n_rows, block_rows = p.q.shape[2], tuning.statistics_rows(gpu.architecture(device))
        launch = KernelLaunch(
            statistics_kernel,
            int(triton.cdiv(n_rows, block_rows)) * p.heads * p.q.shape[0],
            strides=inputs | dict.fromkeys(self.parts(), self.strides),
            DIM_V=p.dim_v,
            BLOCK_DV=block(p.dim_v),
            BLOCK=block_rows,
            LARGE=LARGE[p.accumulator],
            PDL=use_pdl,
        )
        return launch.bind(dout=DOUT, out=OUT, lse=LSE, dlse=DLSE, **self.parts(), n_rows=n_rows, heads=p.heads)


class _RowCuts:
    """The results of row_cuts_kernel in scratch memory: the cuts of all rows of tiles of dkdv_kernel.

    For each sequence, and each head that has spans of its own, they are one row of integers for each cut, as
    row_cuts_of() reads them. Packed sequences lie one after the other, as locate() counts their tiles.
    """

    def __init__(self, p: Problem, config: Config, scratch: Scratch) -> None:
        self._heads, cuts = p.spans.shape[1], 4 * p.spans.shape[3]
        self._tiles, self._config = count_tiles(p, p.n_q, p.q.shape[2], config.block_q), config
        self._batch = p.q.shape[0]
        self.part = scratch.part((self._batch, self._heads, cuts, self._tiles), torch.int32)
        of_head = cuts * self._tiles
        self.strides = (1 if p.packed else self._heads * of_head, 0 if self._heads == 1 else of_head, self._tiles)

    def bind(self) -> BoundLaunch:
        """Launched without PDL, and so complete before any other kernel of the pass begins."""
        launch = KernelLaunch(
            row_cuts_kernel,
            self._tiles * self._heads * self._batch,
            strides={"row_cuts": self.strides},
            CUT_Q=self._config.block_q,
            CUT_K=self._config.block_k,
        )
        return launch.bind(row_cuts=self.part, rule=RULE, lengths=LENGTHS, tiles=self._tiles, heads=self._heads)


class _TileKernels:
    """The kernels that walk tiles of scores, and their common inputs: q, k, v, dout and the row statistics."""

    def __init__(
        self, p: Problem, dout: Any, is_aligned: dict[str, bool], statistics: _Statistics, use_pdl: bool
    ) -> None:
        self._p, self._is_aligned, self._use_pdl = p, is_aligned, use_pdl
        self._tensors = {"q": p.q, "k": p.k, "v": p.v, "dout": dout}
        self._statistics = statistics
        self._strides = {name: strides(x, p) for name, x in self._tensors.items()}
        self._strides |= {"log2": statistics.strides, "delta": statistics.strides}
        self._inputs = {"q": Q, "k": K, "v": V, "dout": DOUT, "rule": RULE, "lengths": LENGTHS}
        self._inputs |= {"log2": statistics.log2, "delta": statistics.delta}

    def dkdv(
        self, config: Config, grads: tuple[Result, ...], flags: Argument, row_cuts: _RowCuts | None
    ) -> BoundLaunch:
        p, (_, dk, dv) = self._p, grads
        tiles = count_tiles(p, p.n_k, p.k.shape[2], config.block_k)
        launch = self._launch(
            dkdv_kernel,
            config,
            tiles * p.kv_heads,
            {"q_desc": self._descriptors("q", config, config.block_q)}
            | {"do_desc": self._descriptors("dout", config, config.block_q)},
            {"dk": dk.strides, "dv": dv.strides, "row_cuts": None if row_cuts is None else row_cuts.strides},
        )
        walked = {"q_desc": Q, "do_desc": DOUT, "row_cuts": None if row_cuts is None else row_cuts.part}
        return launch.bind(**self._inputs, **walked, dk=DK, dv=DV, flags=flags, tiles=tiles, kv_heads=p.kv_heads)

    def dq(self, config: Config, grads: tuple[Result, ...], flags: Argument, first_flag: int) -> BoundLaunch:
        p, (dq, *_) = self._p, grads
        tiles = count_tiles(p, p.n_q, p.q.shape[2], config.block_q)
        launch = self._launch(
            dq_kernel,
            config,
            tiles * p.heads,
            {"k_desc": self._descriptors("k", config, config.block_k)}
            | {"v_desc": self._descriptors("v", config, config.block_k)},
            {"dq": dq.strides},
        )
        walked = {"k_desc": K, "v_desc": V}
        counts = {"first_flag": first_flag, "tiles": tiles, "heads": p.heads}
        return launch.bind(**self._inputs, **walked, dq=DQ, flags=flags, **counts)

    def _descriptors(self, name: str, config: Config, rows: int) -> Maker | None:
        return descriptor_maker(self._tensors[name], self._is_aligned[name], config, rows)

    def _launch(
        self,
        kernel: Any,
        config: Config,
        tiles: int,
        descriptors: dict[str, Maker | None],
        grads: dict[str, Strides | None],
    ) -> KernelLaunch:
        """tiles: of all heads of a sequence."""
        return KernelLaunch(
            kernel,
            tiles * self._p.q.shape[0],
            config.options | pdl_options(self._use_pdl),
            self._strides | grads,
            descriptors,
            C=constants(self._p, config),
            PDL=self._use_pdl,
        )

    def dbias(self, config: Config, shape: torch.Size) -> BoundLaunch:
        """Launched without PDL, when everything before it is complete."""
        p, statistics = self._p, self._statistics
        sequences, heads, n_rows, n_keys = shape
        launch = KernelLaunch(
            dbias_kernel,
            int(triton.cdiv(n_rows, config.block_q) * triton.cdiv(n_keys, config.block_k)) * sequences * heads,
            config.options,
            self._strides | {"tops": statistics.strides},
            SHARE_SEQUENCES=sequences == 1,
            SHARE_HEADS=heads == 1,
            SHARE_ROWS=n_rows == 1,
            SHARE_KEYS=n_keys == 1,
            C=constants(p, config),
        )
        return launch.bind(
            **self._inputs, tops=statistics.tops, dbias=DBIAS, heads=p.heads, n_rows=n_rows, n_keys=n_keys
        )


def _config(kernel: str, p: Problem, device: Any) -> Config:
    if kernel == "dbias":
        return tuning.DBIAS if max(p.dim, p.dim_v) <= 128 else tuning.DBIAS._replace(block_q=16)
    return tuning.choose(
        kernel, p.dim, p.dim_v, p.q.element_size(), gpu.architecture(device), *tuning.choice_options(p)
    )
