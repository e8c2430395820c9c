"""From a Problem to launches: which tiles, which grid, which arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
import triton

from flashtile.backends.triton import tuning
from flashtile.backends.triton.arguments import (
    ALIGNED,
    INTERPRETED,
    Lengths,
    Rule,
    block,
    constants,
    halves,
    lengths,
    pairs,
    rule,
)
from flashtile.backends.triton.backward_kernels import dbias_kernel, dkdv_kernel, dq_kernel, statistics_kernel
from flashtile.backends.triton.chain import FOLLOWING, can_chain
from flashtile.backends.triton.forward_kernel import forward_kernel
from flashtile.backends.triton.mend_kernels import mend_backward_kernel, mend_forward_kernel, mend_sums_kernel
from flashtile.backends.triton.merge_kernel import merge_kernel
from flashtile.backends.triton.scratch import Scratch
from flashtile.backends.triton.start import At, Series, Start, Step, Strides
from flashtile.backends.triton.tensors import (
    Result,
    aligned,
    blocks,
    empty,
    laid_out,
    outline,
    rounded,
    rounded_outline,
    strides,
    tidy_gradients,
)
from flashtile.backends.triton.tuning import Config
from flashtile.inputs import TENSORS, Inputs
from flashtile.problem import Problem, check_gradients
from flashtile.results import Grads

MOST_SPLITS = 64
LARGE = {"float32": 2.0**15, "float64": 2.0**12}  # an lse whose rounding changes weights by 1e-3, or by 1e-13
T = TypeVar("T")


class Passes:
    """A call without its numbers: what is launched for tensors of these shapes, strides, dtypes and alignments."""

    def __init__(self, problem: Problem) -> None:
        self._device = problem.q.device
        self._index = index_of(self._device)
        self._problem = replace(problem, **{name: outline(getattr(problem, name)) for name in TENSORS})
        self._aligned = {name: aligned(getattr(problem, name)) for name in "qkv"}
        self._forward: Callable[[Inputs, bool], tuple[Any, Any]]
        self._ways_back: dict[Any, tuple[Callable[..., Grads], bool]] = {}

    def forward(self, x: Inputs) -> tuple[Any, Any]:
        """Output and lse, contiguous, in the caller's layout."""
        return on_device(self._index, self._forward, x, True)

    def output(self, x: Inputs) -> Any:
        """The output alone: a small call notices what the memory of an lse costs."""
        return on_device(self._index, self._forward, x, False)[0]

    def backward(self, x: Inputs, dout: Any, out: Any, lse: Any, dlse: Any, *, bias_grad: bool = True) -> Grads:
        """Gradients from the saved output and lse, in the caller's layout, those of bias (of rank 4) and sink wide."""
        given = (dout, out, lse, dlse)
        run, is_tidy = self._way_back(given, bias_grad)
        return on_device(self._index, run, x, *(given if is_tidy else self._tidied(given)))

    def _way_back(self, given: tuple[Any, ...], bias_grad: bool) -> tuple[Callable[..., Grads], bool]:
        """What runs a backward pass of tensors that lie like these, and whether they need not be tidied first."""
        dout, out, lse, dlse = given
        key = (bias_grad, kind_of(dout), kind_of(out), kind_of(lse), None if dlse is None else kind_of(dlse))
        found = self._ways_back.get(key)
        if found is None:
            outlines = check_gradients(self._problem, *map(outline, given))
            tidied = self._tidied(given)
            is_tidy = all(map(operator.is_, tidied, given))
            run = self._differentiate(given, outlines, bias_grad) if is_tidy else self._way_back(tidied, bias_grad)[0]
            found = self._ways_back[key] = run, is_tidy
        return found

    def _tidied(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """dout, out, lse and dlse, with rows as the kernels want them."""
        return tidy_gradients(self._problem, *given)

    def _differentiate(
        self, given: tuple[Any, ...], outlines: tuple[Any, ...], bias_grad: bool
    ) -> Callable[..., Grads]:
        """The launches of a backward pass, by the portable kernels."""
        is_aligned = self._aligned | {"dout": aligned(given[0])}
        return Backward(self._problem, self._device, is_aligned, outlines, bias_grad)


class Prepared(Passes):
    """By the portable kernels."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._forward = Forward(self._problem, self._device, self._aligned)


class Forward:
    """The launches of a forward pass."""

    def __init__(self, p: Problem, device: Any, is_aligned: dict[str, bool]) -> None:
        n_rows, batch = p.q.shape[2], p.q.shape[0]
        self._out = Result(p, p.heads, n_rows, p.dim_v, p.out_dtype, device)
        self._lse = Result(p, p.heads, n_rows, None, p.accumulator, device)
        config, packed_heads = tuning.forward(p, _gpu(device))
        tiles, heads = count_tiles(p, p.n_q * packed_heads, n_rows, config.block_q), p.heads // packed_heads
        self._splits = _splits(p, tiles * heads * batch, config, device)
        if self._splits > 1 and p.n_k <= tuning.FEW_KEYS * self._splits:
            config, _ = tuning.forward(p, _gpu(device), short=True)  # a tile has all rows of a decode, whichever it is
            self._splits = _splits(p, tiles * heads * batch, config, device)
        real, between = getattr(torch, p.accumulator), (0, 0)
        if self._splits > 1:
            self._part = self._out.parts(self._splits, dtype=real)
            self._part_lse = self._lse.parts(2 * self._splits, dtype=real)
            between = (self._out.numel, self._lse.numel)
        self._rule, self._lengths = rule(p), lengths(p)
        programs = tiles * heads * self._splits * batch
        # Where each has a processor to itself, a program that mends its own rows is done sooner than another launch.
        # Where keys are split, it has to, however many share a processor: only it knows its share, and a row that was
        # made anew as a whole would be none of the parts that are merged.
        inside = self._splits > 1 or programs <= processors(device)
        chained = not inside and chains(device)
        self._mend = None
        if not inside:
            self._mend = MendForward(p, device, self._out, self._lse, config.block_q, packed_heads, chained)
        q, k, v = (strides(x, p) for x in (p.q, p.k, p.v))
        self._start = Start(
            forward_kernel,
            programs,
            _options(config),
            {0: q, 1: k, 2: v, 5: self._out.strides, 6: self._lse.strides},
            {n: blocks(x, is_aligned[name], config, config.block_k) for n, name, x in ((3, "k", p.k), (4, "v", p.v))},
            PACKED_HEADS=packed_heads,
            SPLITS=self._splits,
            C=constants(p, config, _precision(p)),
            AGAIN=constants(p, _careful(p, config.block_q, config.block_k), _precision(p)) if inside else None,
            CHAINED=chained,
        )
        merge = Start(
            merge_kernel,
            batch * p.heads * n_rows,
            {"num_warps": tuning.merge_warps(self._splits * block(p.dim_v) * real.itemsize)},
            rows=dict(enumerate(2 * (self._out.strides, self._lse.strides))),
            SPLITS=self._splits,
            BLOCK_S=triton.next_power_of_2(self._splits),
            DIM_V=p.dim_v,
            BLOCK_DV=block(p.dim_v),
        )
        at_q, at_k, at_v, out, lse, part, part_lse, marks, *others = map(At, range(11))
        at_sink, at_rule, at_lengths = others
        counts = (tiles, heads, *between)
        where = (at_q, at_k, at_v, at_k, at_v, part, part_lse, at_sink, marks, at_rule, at_lengths)
        steps: list[Step] = [(self._start, (*where, *counts))]
        if self._mend is not None:
            steps.append(self._mend.step(at_q, at_k, at_v, out, lse, at_sink, marks, at_rule, at_lengths))
        if self._splits > 1:
            steps.append((merge, (part, part_lse, out, lse, *between, n_rows, p.heads)))
        self._launch = Series(*steps)

    def __call__(self, x: Inputs, with_lse: bool) -> tuple[Any, Any]:
        out, lse = self._out.empty(), self._lse.empty() if with_lse else self._lse.dump()
        if self._out.numel == 0:
            return out, lse
        part, part_lse = (out, lse) if self._splits == 1 else (self._part(), self._part_lse())
        marks = None if self._mend is None else self._mend.make()
        a_rule, a_lengths = rule_of(self._rule, x), lengths_of(self._lengths, x)
        self._launch(x.q, x.k, x.v, out, lse, part, part_lse, marks, x.sink, a_rule, a_lengths)
        return out, lse


class MendForward:
    """The launch that makes spoiled tiles of a forward pass anew, whichever kernel made them.

    A tile is block_q rows of a head. With packed_heads they are of so many heads, row r of query r // packed_heads, and
    these heads count as one. That kernel writes a mark for each tile, 0 or 1: mend_kernels.py says where. chained: it
    also leads (chain.py).
    """

    def __init__(
        self, p: Problem, device: Any, out: Result, lse: Result, block_q: int, packed_heads: int, chained: bool
    ) -> None:
        n_rows, batch = p.q.shape[2], p.q.shape[0]
        tiles, heads = count_tiles(p, p.n_q * packed_heads, n_rows, block_q), p.heads // packed_heads
        self._marks = Marks(tiles * heads * batch, device)
        self.make = self._marks.make  # not cleared: each tile has its mark written, also one of no rows
        self._counts = (tiles, heads)
        config = _careful(p, block_q)
        self._start = Start(
            mend_forward_kernel,
            self._marks.programs,
            _options(config, chained),
            dict(enumerate((*(strides(x, p) for x in (p.q, p.k, p.v)), out.strides, lse.strides))),
            ROWS=block_q,
            PACKED_HEADS=packed_heads,
            C=constants(p, config, _precision(p)),
            CHAINED=chained,
        )

    def step(self, q: At, k: At, v: At, out: At, lse: At, sink: At, marks: At, a_rule: At, a_lengths: At) -> Step:
        return self._start, (q, k, v, out, lse, sink, marks, self._marks.count, a_rule, a_lengths, *self._counts)


class MendBackward:
    """The launch that makes spoiled tiles of a backward pass anew: dK and dV of block_k keys, dQ of block_q queries.

    The marks of all tiles of keys come first; those of tiles of queries begin at first_of_queries. given: strides of
    dout and of what statistics_kernel made of each row, log2, delta and tops; without tops no lse is ever too coarse.
    natural: log2 is the lse as it was saved, and not in base 2. chained: as the kernel before it says (chain.py).
    """

    def __init__(
        self,
        p: Problem,
        device: Any,
        block_q: int,
        block_k: int,
        given: tuple[Strides | None, ...],
        grads: tuple[Result, ...],
        natural: bool = False,
        chained: bool = False,
    ) -> None:
        batch = p.q.shape[0]
        k_tiles, q_tiles = count_tiles(p, p.n_k, p.k.shape[2], block_k), count_tiles(p, p.n_q, p.q.shape[2], block_q)
        self.first_of_queries = k_tiles * p.kv_heads * batch
        marks = Marks(self.first_of_queries + q_tiles * p.heads * batch, device)
        self.count = marks.count  # of marks that need not be cleared, as in MendForward
        q, k, v = (strides(x, p) for x in (p.q, p.k, p.v))
        self._counts = (k_tiles, p.kv_heads, q_tiles, p.heads)
        of_queries, of_keys = _careful(p, block_q), _careful(p, block_k)
        self._sums = Start(
            mend_sums_kernel,
            marks.programs,
            _options(of_queries, chained),
            present(q, k, given[1], given[3]),
            ROWS=block_q,
            C=constants(p, of_queries, _precision(p)),
            CHAINED=chained,
        )
        of_keys = of_keys._replace(block_q=of_keys.block_k, block_k=of_keys.block_q)
        self._start = Start(
            mend_backward_kernel,
            marks.programs,
            _options(min(of_queries, of_keys, key=lambda config: config.warps), chained),
            present(q, k, v, *given, *(x.strides for x in grads)),
            K_ROWS=block_k,
            Q_ROWS=block_q,
            OF_KEYS=constants(p, of_keys, _precision(p)),
            OF_QUERIES=constants(p, of_queries, _precision(p)),
            NATURAL=natural,
            CHAINED=chained,
        )

    def steps(
        self,
        q: At,
        k: At,
        v: At,
        dout: At,
        log2: At,
        delta: At,
        tops: At | None,
        dq: At,
        dk: At,
        dv: At,
        sink: At,
        marks: At,
        a_rule: At,
        a_lengths: At,
    ) -> list[Step]:
        first, rules, found = self.first_of_queries, (a_rule, a_lengths), list[Step]()
        if tops is not None:
            of_rows = (q, k, log2, tops, sink, marks, first, self.count - first)
            found.append((self._sums, (*of_rows, *rules, *self._counts[2:])))
        of_tiles = (q, k, v, dout, log2, delta, tops, dq, dk, dv, marks, self.count, first)
        return [*found, (self._start, (*of_tiles, *rules, *self._counts))]


def present(*strides: Strides | None) -> dict[int, Strides]:
    """What a Start is told of its first arguments; None of one that is no Rows, or absent."""
    return {n: s for n, s in enumerate(strides) if s is not None}


class Marks:
    """One int32 a tile, and the programs that look at them: enough to fill the GPU where all are set."""

    __slots__ = ("count", "make", "programs")

    def __init__(self, count: int, device: Any) -> None:
        self.count = count
        self.programs = min(count, 2 * processors(device))
        self.make = empty((count,), torch.int32, device)


class Backward:
    """The launches of a backward pass. `given`: outlines of dout, out, lse and dlse."""

    def __init__(
        self, p: Problem, device: Any, is_aligned: dict[str, bool], given: tuple[Any, ...], bias_grad: bool
    ) -> None:
        self._packed, n_rows, batch = p.packed, p.q.shape[2], p.q.shape[0]
        dout = rounded_outline(given[0], p)
        self._narrow = None if dout is given[0] else dout.dtype
        given = (dout, *given[1:])
        of_inputs = [strides(x, p) for x in (p.q, p.k, p.v)]
        of_given = [None if x is None else strides(x, p) for x in given]
        self._rule, self._lengths = rule(p), lengths(p)
        self._real = getattr(torch, p.accumulator)
        of_keys = _config("dkdv", p, device)
        # Rows side by side, with room for a whole tile where the last one begins. Multiples of ALIGNED, whatever the
        # length: there would be kernels for both kinds.
        unit = max(ALIGNED, of_keys.block_q)
        room = int(triton.cdiv(n_rows + unit * p.packed, unit)) * unit
        of_rows = (0 if p.packed else p.heads * room, room, 1)
        q, k, v, at_dout, at_out, at_lse, at_dlse, dq, dk, dv, memory, *others = map(At, range(15))
        at_sink, at_rule, at_lengths, dbias = others
        scratch = Scratch(memory.place, device)
        log2, delta, tops = (scratch.part((batch, p.heads, room), self._real) for _ in range(3))
        self._delta = delta
        self._dq = Result(p, p.heads, n_rows, p.dim, p.dtype, device)
        self._dk = Result(p, p.kv_heads, p.k.shape[2], p.dim, p.dtype, device)
        self._dv = Result(p, p.kv_heads, p.k.shape[2], p.dim_v, p.dtype, device)
        self._heads_at = heads_at(p)
        # Each kernel relies on what the one before it has waited for, so none may be missing.
        chained = chains(device) and all(x.numel for x in (self._dk, self._dq))
        statistics_rows = tuning.statistics_rows(_gpu(device))
        statistics = Start(
            statistics_kernel,
            int(triton.cdiv(n_rows, statistics_rows)) * p.heads * batch,
            rows=present(*of_given, *3 * (of_rows,)),
            DIM_V=p.dim_v,
            BLOCK_DV=block(p.dim_v),
            BLOCK=statistics_rows,
            LARGE=LARGE[p.accumulator],
            CHAINED=chained,
        )
        fetched = [blocks(x, is_aligned[name], of_keys, of_keys.block_q) for name, x in (("q", p.q), ("dout", dout))]
        k_tiles = count_tiles(p, p.n_k, p.k.shape[2], of_keys.block_k)
        dkdv = Start(
            dkdv_kernel,
            k_tiles * p.kv_heads * batch,
            _options(of_keys, chained),
            present(*of_inputs, of_given[0], None, None, of_rows, of_rows, self._dk.strides, self._dv.strides),
            blocks=dict(enumerate(fetched, 4)),
            C=constants(p, of_keys, _precision(p)),
            CHAINED=chained,
        )
        config = _config("dq", p, device)
        fetched = [blocks(x, is_aligned[name], config, config.block_k) for name, x in (("k", p.k), ("v", p.v))]
        q_tiles = count_tiles(p, p.n_q, n_rows, config.block_q)
        for_dq = Start(
            dq_kernel,
            q_tiles * p.heads * batch,
            _options(config, chained),
            present(*of_inputs, of_given[0], None, None, of_rows, of_rows, self._dq.strides),
            blocks=dict(enumerate(fetched, 4)),
            C=constants(p, config, _precision(p)),
            CHAINED=chained,
        )
        grads = (self._dq, self._dk, self._dv)
        of_mend = (of_given[0], *3 * (of_rows,))
        mend = MendBackward(p, device, config.block_q, of_keys.block_k, of_mend, grads, chained=chained)
        marks = scratch.part((mend.count,), torch.int32)
        self._scratch = scratch.maker()
        inputs, rules, steps = (q, k, v, at_dout), (at_rule, at_lengths), list[Step]()
        if self._dq.numel:
            steps.append((statistics, (at_dout, at_out, at_lse, at_dlse, log2, delta, tops, n_rows, p.heads)))
        if self._dk.numel:
            where = (q, at_dout, log2, delta, dk, dv, marks, *rules, k_tiles, p.kv_heads)
            steps.append((dkdv, (*inputs, *where)))
        if self._dq.numel:
            where = (k, v, log2, delta, dq, marks, mend.first_of_queries, *rules, q_tiles, p.heads)
            steps.append((for_dq, (*inputs, *where)))
        if mend.count:
            steps += mend.steps(*inputs, log2, delta, tops, dq, dk, dv, at_sink, marks, *rules)
        self._bias_shape = p.bias.shape if bias_grad and p.bias is not None else None
        if self._bias_shape is not None:
            config = _config("dbias", p, device)
            sequences, heads, down, across = self._bias_shape
            for_dbias = Start(
                dbias_kernel,
                int(triton.cdiv(down, config.block_q) * triton.cdiv(across, config.block_k)) * sequences * heads,
                _options(config),
                present(*of_inputs, of_given[0], *3 * (of_rows,)),
                SHARE_SEQUENCES=sequences == 1,
                SHARE_HEADS=heads == 1,
                SHARE_ROWS=down == 1,
                SHARE_KEYS=across == 1,
                C=constants(p, config, _precision(p)),
            )
            if self._bias_shape.numel():
                steps.append((for_dbias, (*inputs, log2, delta, tops, dbias, *rules, p.heads, down, across)))
        self._launch = Series(*steps)

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
            delta = like_lse(self._delta.of(scratch), given[2], self._packed)
            dsink = sink_gradient(x.sink, given[2], delta, self._heads_at)
        return Grads(dq, dk, dv, dbias, dsink)


def like_lse(rows: Any, lse: Any, packed: bool) -> Any:
    """Statistics of rows, (batch, heads, room), in the shape of an lse in the caller's layout."""
    return rows[0, :, : lse.shape[0]].T if packed else rows[..., : lse.shape[-1]].reshape(lse.shape)


def heads_at(p: Problem) -> int:
    """The axis of heads of an lse in the caller's layout; a call of rank 2 has no such axis."""
    return 1 if p.packed else p.rank - 3


def sink_gradient(sink: Any, lse: Any, delta: Any, heads: int) -> Any:
    """-sum over rows of exp(sink - lse) * delta, whose axis of heads is this one; an empty row has no part in it."""
    rows_at = tuple(axis for axis in range(lse.ndim) if axis != heads)
    weight = torch.exp(sink.to(lse.dtype).reshape([1 if axis in rows_at else -1 for axis in range(lse.ndim)]) - lse)
    parts = torch.where(torch.isneginf(lse), torch.zeros_like(delta), weight * delta)
    return -parts.sum(rows_at).reshape(sink.shape)


def kind_of(x: Any) -> tuple[Any, ...]:
    """All of a tensor that decides what is launched."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED


def index_of(device: Any) -> int | None:
    """Of a GPU, as on_device() takes it."""
    return int(device.index) if device.type == "cuda" else None


def on_device(index: int | None, run: Callable[..., T], *args: Any) -> T:
    """run(*args) with this GPU current, on which Triton then launches."""
    if index is None or index == torch._C._cuda_getDevice():
        return run(*args)
    with torch.cuda.device(index):
        return run(*args)


def rule_of(a_rule: Rule, x: Inputs) -> Rule:
    """The rule with the tensors and the seed of this call."""
    if x.mask is None and x.bias is None and x.alibi is None and x.descale is None and a_rule.seed_low is None:
        return a_rule
    low, high = (None, 0) if a_rule.seed_low is None else halves(x.seed)
    return a_rule._replace(mask=x.mask, bias=x.bias, alibi=x.alibi, seed_low=low, seed_high=high, descale=x.descale)


def lengths_of(some: Lengths, x: Inputs) -> Lengths:
    if x.cu_q is None and x.kv_lengths is None:
        return some
    return some._replace(cu_q=x.cu_q, cu_k=x.cu_k, kv=x.kv_lengths)


def _config(kernel: str, p: Problem, device: Any) -> Config:
    if kernel == "dbias":
        return tuning.DBIAS if max(p.dim, p.dim_v) <= 128 else tuning.DBIAS._replace(block_q=16)
    return tuning.choose(kernel, p.dim, p.dim_v, p.q.element_size(), _gpu(device), *tuning.asks(p))


def _careful(p: Problem, rows: int, walked: int = 32) -> Config:
    """Of the careful walk that makes a tile of so many rows anew, within a kernel whose tiles have `walked` columns."""
    return tuning.careful(p.dim, p.dim_v, p.q.element_size(), _precision(p) != "tf32", rows, walked)


def chains(device: Any) -> bool:
    """Whether the kernels of a pass are launched as a chain."""
    return not INTERPRETED and can_chain(_gpu(device))


def _options(config: Config, follows: bool = False) -> dict[str, int]:
    return {"num_warps": config.warps, "num_stages": config.stages} | (FOLLOWING if follows else {})


@cache
def _gpu(device: Any) -> tuple[int, int] | str | None:
    """What tuning.choose() knows a GPU by."""
    if device.type != "cuda":
        return None
    if torch.version.cuda is None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: Any) -> int:
    if device.type != "cuda":
        return 8  # so that the interpreter meets splits too
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _precision(p: Problem) -> str:
    """float32 products are exact to float32, unless torch was told that its own need not be."""
    if INTERPRETED:
        return "wide"
    loose = p.dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if loose else "ieee"


def _splits(p: Problem, programs: int, config: Config, device: Any) -> int:
    """Shares of the keys, where queries alone leave processors idle. By shape and device only: bits stay the same.

    A power of two: each number of shares is a kernel of its own.
    """
    room = config.programs * processors(device)
    wanted = min(room // max(programs, 1), MOST_SPLITS, p.n_k // (4 * config.block_k))
    return 1 << max(wanted, 1).bit_length() - 1


def count_tiles(p: Problem, rows: int, total: int, block_rows: int) -> int:
    """Tiles along the rows. Packed sequences may begin within a tile, so each of them may need one more."""
    return total // block_rows + p.sequences if p.packed and total else int(triton.cdiv(rows, block_rows))


def forward(problem: Problem) -> tuple[Any, Any]:
    """Output and lse of one problem."""
    problem = laid_out(problem)
    return Prepared(problem).forward(Inputs.of(problem))


def backward(problem: Problem, dout: Any, out: Any, lse: Any, dlse: Any, *, bias_grad: bool = True) -> Grads:
    """Gradients of one problem."""
    problem = laid_out(problem)
    return Prepared(problem).backward(Inputs.of(problem), dout, out, lse, dlse, bias_grad=bias_grad)
