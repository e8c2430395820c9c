"""The C++ core: the fast CPU path. This side packs a Problem into the struct of core/flashtile.h and calls it."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np

from flashtile.backends.native import library
from flashtile.backends.native.blocks import tile
from flashtile.backends.native.library import why_not as missing
from flashtile.backends.native.runner import MOST_ROWS, OTHERS, Prepared
from flashtile.host import threads
from flashtile.host.address import address
from flashtile.numerics.dtypes import Array, carrier, widen
from flashtile.problem import Problem
from flashtile.results import Grads

__all__ = ["backward", "forward", "missing", "small", "tile"]

_DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}

# ft_problem of core/flashtile.h: integers, three doubles, the seed, three pointers, eight tensors, sink, six, dsink.
_STRUCT = struct.Struct("16q 3d Q 3Q" + " Q4q" * 8 + " Q" + " Q4q" * 6 + " Q")

_Tensor = tuple[int, ...]  # address, and strides of sequence, head, row and column in elements
_ABSENT: _Tensor = (0, 0, 0, 0, 0)


def forward(problem: Problem, memory: Any = np) -> tuple[Array, Array]:
    """Output (rank 4, rounded to out_dtype) and lse (rank 3). memory: what makes arrays, as NumPy does."""
    out = _empty(problem, problem.out_shape(), problem.out_dtype, memory)
    lse = _empty(problem, problem.out_shape()[:-1], problem.accumulator, memory)
    alive: list[Array] = []
    _check(library.load().ft_forward(_packed(problem, out, lse, alive)))
    return out, lse


def small(problem: Problem) -> Prepared | None:
    """What runs this call again for other numbers; None where nobody would notice, or arrays have to be copied."""
    p = problem
    if math.prod(p.out_shape()[:-1]) > MOST_ROWS or p.packed or not p.q.size or not p.k.size or not p.v.size:
        return None
    if not all(map(_lies_well, (p.q, p.k, p.v))):  # before they are copied: the call itself will do that
        return None
    out = _empty(p, p.out_shape(), p.out_dtype)
    lse = _empty(p, p.out_shape()[:-1], p.accumulator)
    given = {name: x for name in OTHERS if (x := getattr(p, name)) is not None}
    alive: list[Array] = []
    words = _packed(replace(p, kv_lengths=None), out, lse, alive)
    if any(not any(x is y for y in given.values()) for x in alive):  # a copy
        return None
    lengths = 0 if p.kv_lengths is None else p.sequences
    return Prepared(words, lengths, tuple(given), library.load().ft_forward, _check)


def _packed(p: Problem, out: Array, lse: Array, alive: list[Array]) -> bytes:
    """The struct of a forward call."""
    fields = _given(p, alive)
    fields += [*_rows(out, alive), *_rows(lse[..., None], alive), *_options(p, alive), *_ABSENT * 6, 0]
    return _STRUCT.pack(*fields)


def backward(
    problem: Problem, dout: Any, out: Any, lse: Any, dlse: Any, *, bias_grad: bool = True, memory: Any = np
) -> Grads:
    """Gradients; those of q, k and v rounded to the dtype of the problem. memory: as in forward()."""
    dq, dk, dv = (_empty(problem, x.shape, problem.dtype, memory) for x in (problem.q, problem.k, problem.v))
    dbias = None if problem.bias is None or not bias_grad else memory.zeros(problem.bias.shape, problem.accumulator)
    dsink = None if problem.sink is None else np.empty(problem.sink.shape, problem.accumulator)
    alive: list[Array] = []
    fields = _given(problem, alive)
    fields += [*_rows(out, alive), *_rows(lse[..., None], alive), *_options(problem, alive), *_rows(dout, alive)]
    fields += _ABSENT if dlse is None else _rows(dlse[..., None], alive)
    fields += [*_rows(dq, alive), *_rows(dk, alive), *_rows(dv, alive)]
    fields += _ABSENT if dbias is None else _pairs(dbias, alive)
    fields.append(0 if dsink is None else address(dsink))
    _check(library.load().ft_backward(_STRUCT.pack(*fields)))
    return Grads(dq, dk, dv, dbias, dsink)


def _given(p: Problem, alive: list[Array]) -> list[Any]:
    """The struct up to v. Arrays that had to be copied are put in `alive`, for as long as the call takes."""
    bias_dtype = p.accumulator if p.bias is None or p.bias.itemsize > 2 else p.dtype
    fields: list[Any] = [
        _STRUCT.size,
        p.threads or threads.default(),
        _DTYPES[p.dtype],
        _DTYPES[p.out_dtype],
        _DTYPES[bias_dtype],
        p.sequences,
        p.heads,
        p.kv_heads,
        p.n_q,
        p.n_k,
        p.dim,
        p.dim_v,
        p.band.left,
        p.band.right,
        p.band.offset,
        p.align_end,
        p.scale,
        p.softcap,
        p.dropout,
        p.seed,
    ]
    fields += [0 if x is None else _plain(x, "int64", alive) for x in (p.cu_q, p.cu_k, p.kv_lengths)]
    fields += [*_rows(p.q, alive), *_rows(p.k, alive), *_rows(p.v, alive)]
    return fields


def _options(p: Problem, alive: list[Array]) -> tuple[int, ...]:
    """bias, mask, alibi, sink."""
    bias = _ABSENT if p.bias is None else _pairs(p.bias, alive)
    mask = _ABSENT if p.mask is None else _pairs(p.mask, alive)
    alibi = _ABSENT
    if p.alibi is not None:
        rows, heads = p.alibi.shape
        alibi = (_plain(p.alibi, p.accumulator, alive), heads if rows > 1 else 0, 1, 0, 0)
    return (*bias, *mask, *alibi, 0 if p.sink is None else _plain(p.sink, p.accumulator, alive))


def _pairs(x: Array, alive: list[Array]) -> _Tensor:
    """A mask or bias: any strides of whole elements, 0 along axes of length 1; one between elements is copied."""
    item = x.itemsize
    if any(n % item for n in (address(x), *x.strides)):
        x = np.array(x, order="C")
        alive.append(x)
    return (address(x), *(0 if n == 1 else s // item for n, s in zip(x.shape, x.strides, strict=True)))


def _rows(x: Array, alive: list[Array]) -> _Tensor:
    """A tensor of rank 4 with contiguous columns; one without them, or between elements, is copied."""
    if not _lies_well(x):
        x = np.array(x, order="C")
        alive.append(x)
    item = x.itemsize
    a, b, c, _ = x.strides
    return address(x), a // item, b // item, c // item, 1


def _lies_well(x: Array) -> bool:
    """Whether the core can read x where it is: flags.aligned would say yes to any record, and so to any bfloat16."""
    item = x.itemsize
    a, b, c, d = x.strides
    return (d == item or x.shape[3] <= 1) and not (address(x) | a | b | c) & (item - 1)


def _plain(x: Array, dtype: str, alive: list[Array]) -> int:
    """The address of a small array, contiguous, aligned and of this dtype."""
    x = np.ascontiguousarray(widen(x, dtype))
    if not x.flags.aligned:
        x = x.copy()
    alive.append(x)
    return address(x)


def _empty(p: Problem, shape: tuple[int, ...], dtype: str, memory: Any = np) -> Array:
    """An array of this shape; packed ones lie as (rows, heads, ...) in memory."""
    if not p.packed:
        return memory.empty(shape, carrier(dtype))  # type: ignore[no-any-return]
    packed: Array = memory.empty((1, shape[2], shape[1], *shape[3:]), carrier(dtype)).swapaxes(1, 2)
    return packed


def _check(status: int) -> None:
    if status == 2:
        raise MemoryError("native core: out of memory")
    if status:
        raise RuntimeError("native core: it was built for another version of flashtile")
