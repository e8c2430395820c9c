"""Runner: a packed struct of the C++ core (core/flashtile.h), in which each call replaces addresses and numbers."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flashtile.backends.native import library
from flashtile.checks.options import check_lengths
from flashtile.checks.shapes import check_gradients, rank4
from flashtile.host import threads
from flashtile.host.address import address
from flashtile.host.arrays import Arrays
from flashtile.host.memory_order import Order, axes_of_caller, of_caller, strides_of
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import ITEMSIZE, name_of, widen
from flashtile.options import ARRAYS
from flashtile.problem import Problem
from flashtile.results import Grads, Target

DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
# ft_problem: integers, three doubles, the seed, three pointers, nine tensors, the number of spans, sink, six tensors,
# dsink, the dtype of gradients, which of them are added, and six integers. A tensor is an address and the strides of
# sequence, head, row and column in elements.
_STRUCT = struct.Struct("16q 3d Q 3Q" + " Q4q" * 9 + " q Q" + " Q4q" * 6 + " Q 2q 6q")
# Indices of its 64-bit words.
THREADS, SEED, STARTS, LENGTHS, Q, K, V, OUT, LSE = 1, 19, 20, 22, 23, 28, 33, 38, 43
OTHERS = {"bias": 48, "mask": 53, "alibi": 58, "spans": 63, "sink": 69}
DOUT, DLSE, DQ, DK, DV, DBIAS, DSINK = 70, 75, 80, 85, 90, 95, 100

_ADD = (1, 2, 4, 0, 8)  # flags of gradients that are added, in the order of Grads; dbias always is

_kind = attrgetter("shape", "dtype")
_Tensor = tuple[int, ...]
_NO_TENSOR: _Tensor = (0, 0, 0, 0, 0)


class Runner:
    """Runs forward and backward passes of a problem; if `reusable`, also of other arrays with the same layout.

    Concurrent threads use separate copies of the struct. orders: of the axes in memory of the caller's q, k and v.
    """

    def __init__(self, p: Problem, arrays: Arrays, reusable: bool, orders: Sequence[Order]) -> None:
        core = library.load()
        self.reusable, self._kept_alive = reusable, None if reusable else p
        self._problem = p = _outlined(p)
        self.alignment = max(x.itemsize for x in (p.q, p.bias, p.alibi, p.sink) if x is not None)
        self._arrays = arrays
        self._address = arrays.address if reusable else address
        self._threads = p.threads or threads.from_environment()
        self._others = [(name, word) for name, word in OTHERS.items() if getattr(p, name) is not None]
        self._has_lengths, self._packed = p.kv_lengths is not None, p.packed
        self._forward, self._backward = core.ft_forward, core.ft_backward
        self._orders = orders
        self._out, self._lse = self._result(p.out_shape(), p.out_dtype, orders[0]), self._lse_maker()
        self._template = _STRUCT.pack(
            *_inputs(p),
            *_result_field(p, p.out_shape(), orders[0]),
            *_lse_field(p),
            *_options(p),
            *_NO_TENSOR * 6,
            *(0, 0, 0),
            *_origin(p),
        )
        self._free_structs: list[tuple[Any, Any]] = []
        self._backward_layouts: dict[Any, _BackwardLayout] = {}

    def forward(self, x: Inputs, with_lse: bool = True) -> tuple[Any, Any]:
        """Return output, in memory as q, and lse or None, contiguous; both in the caller's layout."""
        out, lse = self._out(), self._lse() if with_lse else None
        words, _ = call = self._fill(x, self._free_structs, self._template)
        address = self._arrays.address
        words[OUT], words[LSE] = address(out), address(lse) if with_lse else 0
        if status := self._forward(words):
            fail(status)
        self._free_structs.append(call)
        return out, lse

    def backward(
        self,
        x: Inputs,
        dout: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        *,
        bias_grad: bool = True,
        target: Target | None = None,
    ) -> Grads:
        """Return gradients in the caller's layout; those of bias (rank 4) and sink in accumulator precision."""
        arrays = self._arrays
        address, strides = arrays.address, arrays.strides
        key: tuple[Any, ...] = (
            bias_grad,
            *_kind(dout),
            strides(dout),
            *_kind(out),
            strides(out),
            *_kind(lse),
            strides(lse),
        )
        if dlse is not None:
            key += *_kind(dlse), strides(dlse)
        if target is not None:
            key += target.dtype, *(None if y is None else (*_kind(y), strides(y)) for y in target.into)
        layout = self._backward_layouts.get(key)
        if layout is None:
            layout = self._backward_layouts[key] = _BackwardLayout(self, dout, out, lse, dlse, bias_grad, target)
        at_dout, at_out, at_lse = address(dout), address(out), address(lse)
        at_dlse = 0 if dlse is None else address(dlse)
        if layout.needs_copies or (at_dout | at_out) & layout.align_mask or (at_lse | at_dlse) & layout.sums_align_mask:
            dout, out, lse, dlse = (None if y is None else arrays.contiguous(y) for y in (dout, out, lse, dlse))
            if layout.needs_copies:
                return self.backward(x, dout, out, lse, dlse, bias_grad=bias_grad, target=target)
            at_dout, at_out, at_lse, at_dlse = (0 if y is None else address(y) for y in (dout, out, lse, dlse))
        words, _ = call = self._fill(x, layout.free_structs, layout.template)
        words[OUT], words[LSE], words[DOUT], words[DLSE] = at_out, at_lse, at_dout, at_dlse
        make_dq, make_dk, make_dv, make_dbias, make_dsink = layout.results
        if target is None:
            dq, dk, dv, dbias, dsink = make_dq(), make_dk(), make_dv(), None, None
        else:
            dq, dk, dv, dbias, dsink = layout.buffers(target.into)
        words[DQ], words[DK], words[DV] = address(dq), address(dk), address(dv)
        if make_dbias is not None:
            if dbias is None:
                dbias = make_dbias()
                arrays.clear(dbias)
            words[DBIAS] = address(dbias)
        if make_dsink is not None:
            if dsink is None:
                dsink = make_dsink()
            words[DSINK] = address(dsink)
        if status := self._backward(words):
            fail(status)
        layout.free_structs.append(call)
        return Grads(dq, dk, dv, dbias, dsink)

    def _fill(self, x: Inputs, free: list[tuple[Any, Any]], template: bytes) -> tuple[Any, Any]:
        """Fill a free or new copy of the struct with the inputs of a call. Return it and the memory of its lengths."""
        try:
            call = free.pop()
        except IndexError:
            call = self._new_struct(template)
        words, lengths = call
        address, seed = self._address, x.seed
        words[THREADS] = self._threads or self._arrays.threads()
        words[SEED] = seed if seed.__class__ is int else self._arrays.seed_value(seed)
        words[Q], words[K], words[V] = address(x.q), address(x.k), address(x.v)
        for name, word in self._others:
            words[word] = address(getattr(x, name))
        if self._has_lengths:
            values = x.kv_lengths.tolist()
            if self.reusable and values and not 0 <= min(values) <= max(values) <= self._problem.n_k:
                check_lengths(np.array(values), self._problem.n_k)
            lengths[:] = values
        if self._packed:
            words[STARTS], words[STARTS + 1] = address(x.cu_q), address(x.cu_k)
        return call

    def _new_struct(self, template: bytes) -> tuple[Any, Any]:
        words = (ctypes.c_uint64 * (len(template) // 8)).from_buffer_copy(template)
        lengths = (ctypes.c_int64 * self._problem.sequences)() if self._has_lengths else None
        if lengths is not None:
            words[LENGTHS] = ctypes.addressof(lengths)
        return words, lengths

    def _result(self, shape: Sequence[int], dtype: str, order: Order) -> Callable[[], Any]:
        """Return a function that makes a result of this shape, rank 4, in the caller's layout."""
        p = self._problem
        shape = tuple(shape[axis] for axis in axes_of_caller(p.rank, p.packed))
        return self._arrays.maker(shape, dtype, p.q.dtype, of_caller(order, p.rank, p.packed))

    def _lse_maker(self) -> Callable[[], Any]:
        p = self._problem
        shape = tuple(p.q.shape[axis] for axis in axes_of_caller(p.rank, p.packed)[:-1])
        return self._arrays.maker(shape, p.accumulator, p.q.dtype)


class _BackwardLayout:
    """What a backward pass needs for dout, out, lse and dlse of one layout.

    needs_copies: they must be copied first, because the core reads only aligned rows with contiguous columns.
    """

    def __init__(
        self, runner: Runner, dout: Any, out: Any, lse: Any, dlse: Any, bias_grad: bool, target: Target | None
    ) -> None:
        p, arrays = runner._problem, runner._arrays
        checked = check_gradients(p, dout, out, lse, dlse)
        views = [None if x is None else arrays.to_numpy(x) for x in checked]
        self.align_mask, self.sums_align_mask = ITEMSIZE[p.out_dtype] - 1, ITEMSIZE[p.accumulator] - 1
        self.needs_copies = not all(x is None or _is_readable(x, n < 2, 0) for n, x in enumerate(views))
        self.free_structs: list[tuple[Any, Any]] = []
        if self.needs_copies:
            return
        dout, out, lse, dlse = views
        shapes = [x.shape for x in (p.q, p.k, p.v)]
        bias_grad, real = p.bias is not None and bias_grad, p.accumulator
        grad_dtype, into = target or Target(p.dtype)
        self.results: list[Any] = [
            runner._result(n, grad_dtype, x) for n, x in zip(shapes, runner._orders, strict=True)
        ]
        self.results += [arrays.maker(p.bias.shape, real, None) if bias_grad else None]
        self.results += [None if p.sink is None else arrays.maker(p.sink.shape, real, None)]
        gradients = [_result_field(p, shape, order) for shape, order in zip(shapes, runner._orders, strict=True)]
        dbias = _pairs_field(p.bias.shape, strides_of(p.bias.shape, (0, 1, 2))) if bias_grad else _NO_TENSOR
        for n, x in enumerate(into[:3]):
            if x is not None:
                gradients[n] = _row_field(arrays.to_numpy(rank4("into", x, p.rank, p.packed)))
        # The core adds to these itself; the runner's caller adds to those of another dtype, or of sinks that lie apart.
        dbias_fits, dsink_fits = (x is not None and name_of(x.dtype) == real for x in into[3:])
        if dbias_fits:
            dbias = _broadcast_field(arrays.to_numpy(into.dbias)[(None,) * (4 - into.dbias.ndim)])
        dsink_fits = dsink_fits and arrays.to_numpy(into.dsink).flags.c_contiguous
        self._fits = (*(x is not None for x in into[:3]), dbias_fits, dsink_fits)
        self.template = _STRUCT.pack(
            *_inputs(p),
            *_row_field(out),
            *_row_field(lse[..., None]),
            *_options(p),
            *_row_field(dout),
            *(_NO_TENSOR if dlse is None else _row_field(dlse[..., None])),
            *sum(gradients, ()),
            *dbias,
            0,
            DTYPES[grad_dtype],
            sum(flag for flag, fits in zip(_ADD, self._fits, strict=True) if fits),
            *_origin(p),
        )

    def buffers(self, into: Grads) -> list[Any]:
        """The buffers that the core adds to, a new dq, dk or dv for those that are None, and None otherwise."""
        found = [x if fits else None for x, fits in zip(into, self._fits, strict=True)]
        return [make() if x is None else x for x, make in zip(found[:3], self.results, strict=False)] + found[3:]


def laid_out(p: Problem) -> Problem:
    """Return the problem with copies of arrays whose layout the core cannot read; p itself if there are none."""
    copies: dict[str, Any] = {
        name: np.array(x, order="C") for name in "qkv" if not _is_readable(x := getattr(p, name), True, address(x))
    }
    for name in ("mask", "bias", "spans"):
        x = getattr(p, name)
        if x is not None and any(n % x.itemsize for n in (address(x), *x.strides)):
            copies[name] = np.array(x, order="C")
    if p.spans is not None and p.spans.strides[3:] != (8, 4):
        copies["spans"] = np.array(p.spans, order="C")
    vectors = {"alibi": p.accumulator, "sink": p.accumulator, "cu_q": "int64", "cu_k": "int64"}
    for name, dtype in vectors.items():
        x = getattr(p, name)
        if x is not None and (vector := _vector(x, dtype)) is not x:
            copies[name] = vector
    return replace(p, **copies) if copies else p


def _vector(x: Any, dtype: str) -> Any:
    """Return x, or a copy if it is not contiguous, aligned and of this dtype."""
    found = np.ascontiguousarray(widen(x, dtype))
    return found if found.flags.aligned else found.copy()


def _outlined(p: Problem) -> Problem:
    """Return the problem with arrays of the same shapes, strides and dtypes but without memory."""
    found: dict[str, Any] = {}
    for name in ("q", "k", "v", *ARRAYS):
        if (x := getattr(p, name)) is not None:
            found[name] = as_strided(np.empty(1, x.dtype), x.shape, x.strides)
    return replace(p, **found)


def _inputs(p: Problem) -> list[Any]:
    """The fields of the struct up to v, without addresses."""
    bias_dtype = p.accumulator if p.bias is None or p.bias.itemsize > 2 else p.dtype
    dtypes = (DTYPES[p.dtype], DTYPES[p.out_dtype], DTYPES[bias_dtype])
    sizes = (p.sequences, p.heads, p.kv_heads, p.n_q, p.n_k, p.dim, p.dim_v)
    band = (p.band.left, p.band.right, p.band.offset, p.align_end)
    fields = [_STRUCT.size, 1, *dtypes, *sizes, *band, p.scale, p.softcap, p.dropout, 0, 0, 0, 0]
    return [*fields, *_row_field(p.q), *_row_field(p.k), *_row_field(p.v)]


def _options(p: Problem) -> tuple[int, ...]:
    """The fields of bias, mask, alibi, spans and sink, without addresses."""
    pairs = (_NO_TENSOR if x is None else _broadcast_field(x) for x in (p.bias, p.mask))
    alibi = _NO_TENSOR
    if p.alibi is not None:
        rows, heads = p.alibi.shape
        alibi = (0, heads if rows > 1 else 0, 1, 0, 0)
    spans, count = _NO_TENSOR, 0
    if p.spans is not None:
        spans, count = (*_broadcast_field(p.spans)[:4], 0), p.spans.shape[3]
    return (*sum(pairs, ()), *alibi, *spans, count, 0)


def _origin(p: Problem) -> tuple[int, ...]:
    """The fields that say where dropout counts from."""
    x = p.origin
    return x.query, x.query_step, x.key, x.key_step, x.sequence * x.heads + x.head, x.heads


def _broadcast_field(x: Any) -> _Tensor:
    """The field of a mask, bias or spans: strides are 0 along axes of length 1."""
    return _pairs_field(x.shape, [s // x.itemsize for s in x.strides])


def _pairs_field(shape: Sequence[int], strides: Sequence[int]) -> _Tensor:
    return (0, *(0 if n == 1 else s for n, s in zip(shape, strides, strict=True)))


def _row_field(x: Any) -> _Tensor:
    """The field of a tensor of rank 4 with contiguous columns."""
    a, b, c, _ = x.strides
    return 0, a // x.itemsize, b // x.itemsize, c // x.itemsize, 1


def _result_field(p: Problem, shape: Sequence[int], order: Order) -> _Tensor:
    """The field of a dense result of this shape, rank 4, with its axes in this order."""
    sequence, head, row, _ = strides_of(shape, order)
    return 0, 0 if p.packed else sequence, head, row, 1


def _lse_field(p: Problem) -> _Tensor:
    """The field of a contiguous lse."""
    _, heads, rows, _ = p.q.shape
    return (0, 0, 1, heads, 1) if p.packed else (0, heads * rows, rows, 1, 1)


def _is_readable(x: Any, has_columns: bool, at: int) -> bool:
    """Whether the core can read x at this address. (flags.aligned is true for any record dtype, also BFLOAT16.)"""
    if not x.size:
        return True
    *strides, last = x.strides
    if not has_columns:
        strides.append(last)
    elif last != x.itemsize and x.shape[-1] > 1:
        return False
    return not any(n % x.itemsize for n in (at, *strides))


def fail(status: int) -> NoReturn:
    if status == 2:
        raise MemoryError("native core: out of memory")
    raise RuntimeError("native core: it was built for another version of flashtile")
