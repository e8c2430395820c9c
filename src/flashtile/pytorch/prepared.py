"""Calls that come again: what runs one is worked out once and found again by the tensors and options of the next."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from flashtile import dispatch
from flashtile.band import Band
from flashtile.dtypes import EIGHT_BITS
from flashtile.inputs import TENSORS, Inputs
from flashtile.problem import describe
from flashtile.pytorch import on_cpu
from flashtile.pytorch.watch import left_alone, never_hears, quiet, unwatched

MOST = 2048  # calls remembered; a cache that grows by a token a step would otherwise fill the memory
ALIGNED = 16  # bytes, that addresses are multiples of or not
_OPTIONS = TENSORS[3:]
_NONE = (None,) * len(_OPTIONS)
_NO_ONE: tuple[Known, ...] = ()
_inputs: Any = tuple.__new__  # Inputs._make() takes twice as long


class Known(NamedTuple):
    """What runs a call, and how a call like it is told.

    alike is torch's own look at tensors: types, devices, dtypes, shapes, strides, which of them need gradients, and
    what the dispatcher would do with them. It does not see where they lie: off is _off() of them.
    """

    alike: Any
    off: tuple[int, ...] | None
    run: Any
    with_others: bool  # whether any tensor comes with q, k and v
    needs_gradients: bool
    unwatched: bool

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Inputs:
        others = map(options.get, _OPTIONS) if self.with_others else _NONE
        made: Inputs = _inputs(Inputs, (q, k, v, *others, options.get("seed", 0)))
        return made


_known: dict[Any, list[Known]] = {}


def find(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Any, Inputs]:
    """What runs this call, and the tensors to run it on. A wrong call is told so here.

    None where the backend does not multiply 8-bit tensors as they are.
    """
    key, tensors = _key(q, k, v, backend, options)
    known = _recall(key, tensors)
    if known is not None:
        return known.run, known.inputs(q, k, v, options)
    run, inputs, lasting = (on_cpu.work_out if q.is_cpu else _on_gpu)(q, k, v, backend, options)
    if lasting:
        _remember(key, tensors, run, any(x is not None for x in inputs[3:-1]))
    return run, inputs


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Any, Inputs, bool]:
    """What on_cpu.work_out() is on a CPU."""
    given = describe(q, k, v, **options)
    row = dispatch.choose(given, backend, q.device.type)
    if given.dtype == EIGHT_BITS and not row.eight_bits:
        return None, Inputs.of(given), False
    run, problem = row.prepare(given)
    return run, Inputs.of(problem), problem is given


@left_alone
def recall(q: Any, k: Any, v: Any, backend: str, options: dict[str, Any]) -> Known | None:
    """A call like this one, which may be anything that a caller might give, where neither is watched; None without."""
    try:
        if not quiet():
            return None
        known = _recall(*_key(q, k, v, backend, options))
    except (AttributeError, RuntimeError):  # not even a shape; of nested tensors torch says so in another way
        return None
    return known if known is not None and known.unwatched else None


def _recall(key: Any, tensors: tuple[Tensor, ...]) -> Known | None:
    try:
        found = _known.get(key, _NO_ONE)
    except TypeError:
        return None
    for known in found:
        if known.alike.check(*tensors) and known.off == _off(tensors):
            return known
    return None


def _remember(key: Any, tensors: tuple[Tensor, ...], run: Any, with_others: bool) -> None:
    if key is None:
        return
    if sum(map(len, _known.values())) >= MOST:
        _known.clear()
    known = Known(
        TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None),
        _off(tensors),
        run,
        with_others,
        any(x.requires_grad for x in tensors),
        unwatched(tensors) and all(map(never_hears, tensors)),
    )
    with suppress(TypeError):  # an option that cannot be hashed
        _known.setdefault(key, []).append(known)


def _off(tensors: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    """By how many bytes tensors miss the alignment for which kernels are compiled; None where none does."""
    if len(tensors) == 3:
        q, k, v = tensors
        if not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNED:
            return None
    return tuple(x.data_ptr() % ALIGNED for x in tensors)


def _key(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """All that decides what is launched: what is not in the tensors, and the tensors; None for what is not remembered.

    Lengths are in both, so that few calls have the same key.
    """
    precise = torch.get_float32_matmul_precision() if q.dtype is torch.float32 else None
    if not options:
        return (backend, q.shape, k.shape, precise), (q, k, v)
    key: list[Any] = [backend, q.shape, k.shape, precise]
    tensors = [q, k, v]
    for name, x in options.items():
        if x is None:
            continue
        kind = x.__class__
        if name == "seed":
            if kind is not int or not 0 <= x < 1 << 64:  # for describe() to look at
                return None, (q, k, v)
        elif kind is bool or kind is float:
            key += name, x, kind
        elif isinstance(x, Tensor):
            key.append(name)
            tensors.append(x)
        else:
            key += (name, x, kind, _classes(x))
    return tuple(key), tuple(tensors)


def _classes(x: Any) -> Any:
    """Of the numbers in a window or a band: 1 equals True and 1.0, but describe() does not take them for each other."""
    if isinstance(x, Band):
        x = (x.left, x.right, x.offset)
    return tuple(map(type, x)) if isinstance(x, tuple) else None
