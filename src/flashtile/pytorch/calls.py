"""Calls that come again: what runs one is worked out once and found again by the tensors and options of the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from flashtile import dispatch
from flashtile.backends.gpu.device import tf32
from flashtile.calls import part_of_key
from flashtile.checks.arguments import check_stored, elements_across
from flashtile.inputs import TENSORS, Inputs
from flashtile.numerics.dtypes import EIGHT_BITS
from flashtile.problem import describe
from flashtile.pytorch import on_cpu
from flashtile.pytorch.interception import left_alone, never_hears, quiet, unwatched
from flashtile.pytorch.operands import tensors_of

MOST = 2048  # calls remembered; a cache that grows by a token a step would otherwise fill the memory
MOST_OF_A_KEY = 16  # each is looked at until one fits
ALIGNED = 16  # bytes, that addresses are multiples of or not
_OPTIONS = TENSORS[3:]
_NONE = (None,) * len(_OPTIONS)
_NO_ONE: tuple[Known, ...] = ()
_MAY_BE_NONE = {*TENSORS, "window", "band", "scale", "out_dtype", "threads"}
_inputs: Any = tuple.__new__  # Inputs._make() takes twice as long


class Known(NamedTuple):
    """What runs a call, and how a call like it is told.

    alike is torch's own look at tensors: types, devices, dtypes, shapes, strides, which of them need gradients, and
    what the dispatcher would do with them. It does not see where they lie: off is _off() of them, where that matters to
    what runs the call; reach: how many elements there are from the first to the last one, and the bytes of each.
    """

    alike: Any
    anywhere: bool
    off: tuple[int, ...] | None
    reach: tuple[tuple[int, int], ...]
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
    check_stored(tensors_of(q, k, v, options))
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
    if not quiet() or (options and options.get("descale") is not None):  # what is remembered of it is something else
        return None
    try:
        known = _recall(*_key(q, k, v, backend, options))
    except (AttributeError, RuntimeError, TypeError):  # not even a shape; or one that cannot be hashed
        return None
    return known if known is not None and known.unwatched else None


def _recall(key: Any, tensors: tuple[Tensor, ...]) -> Known | None:
    for known in _known.get(key, _NO_ONE):
        if (
            known.alike.check(*tensors)
            and (known.anywhere or known.off == _off(tensors))
            and _stored(tensors, known.reach)
        ):
            return known
    return None


def _remember(key: Any, tensors: tuple[Tensor, ...], run: Any, with_others: bool) -> None:
    if key is None:
        return
    if sum(map(len, _known.values())) >= MOST:
        _known.clear()
    known = Known(
        TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None),
        run.anywhere,
        _off(tensors),
        tuple((elements_across(x), x.element_size()) for x in tensors),
        run,
        with_others,
        any(x.requires_grad for x in tensors),
        unwatched(tensors) and all(map(never_hears, tensors)),
    )
    found = _known.setdefault(key, [])
    found.append(known)
    if len(found) > MOST_OF_A_KEY:
        del found[0]


def _off(tensors: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    """By how many bytes tensors miss the alignment for which kernels are compiled; None where none of three does."""
    if len(tensors) == 3:
        q, k, v = tensors
        if not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNED:
            return None
    return tuple(x.data_ptr() % ALIGNED for x in tensors)


def _stored(tensors: tuple[Tensor, ...], reach: tuple[tuple[int, int], ...]) -> bool:
    """Whether the storage of each holds it: it may have been freed, or shrunk, since the tensor was made."""
    if len(tensors) == 3:  # as of most calls; a loop takes longer
        (q, k, v), ((of_q, size), (of_k, _), (of_v, _)) = tensors, reach
        return (
            len(q.untyped_storage()) >= (q.storage_offset() + of_q) * size
            and len(k.untyped_storage()) >= (k.storage_offset() + of_k) * size
            and len(v.untyped_storage()) >= (v.storage_offset() + of_v) * size
        )
    for x, (across, size) in zip(tensors, reach, strict=True):
        if len(x.untyped_storage()) < (x.storage_offset() + across) * size:
            return False
    return True


def _key(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """All that decides what runs: what is not in the tensors, and the tensors, each once.

    Lengths are in both, so that few calls have the same key. None for a call that is not remembered: an option of it is
    wrong, or may have another value by the next time, or a tensor is nested, which is more than guards can look at.
    """
    precise = None if q.is_cpu or q.dtype is not torch.float32 else tf32()
    if backend.__class__ is not str or v.is_nested:
        return None, (q, k, v)
    apart = q is not k and k is not v and q is not v
    if apart and not options:
        return (backend, q.shape, k.shape, precise), (q, k, v)
    key: list[Any] = [backend, q.shape, k.shape, precise]
    tensors = [q, k, v]
    for name, x in options.items():
        if x is None and name in _MAY_BE_NONE:
            continue
        kind = x.__class__
        if kind is int and name == "seed":
            if not 0 <= x < 1 << 64:
                return None, (q, k, v)
        elif kind is bool or kind is float or kind is torch.dtype:  # as most are
            key += name, x, kind
        elif (name in TENSORS or name == "seed") and isinstance(x, Tensor):
            if x.is_nested:
                return None, (q, k, v)
            key.append(name)
            tensors.append(x)
        elif name != "seed" and (part := part_of_key(name, x)) is not None:
            key += part
        else:
            return None, (q, k, v)
    if apart and len(tensors) == 3:
        return tuple(key), (q, k, v)
    # The guards take no tensor for another one, so one that comes twice is looked at once, and where is in the key.
    first: dict[int, int] = {}
    places = tuple(first.setdefault(id(x), n) for n, x in enumerate(tensors))
    if len(first) < len(tensors):
        return (*key, places), tuple(tensors[n] for n in first.values())
    return tuple(key), tuple(tensors)
