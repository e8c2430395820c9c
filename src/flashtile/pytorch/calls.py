"""Cache of prepared calls of tensors: an Entry is a runner, and the guard that recognises its calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from flashtile import dispatch
from flashtile.backends.gpu.device import tf32
from flashtile.calls import part_of_key
from flashtile.inputs import NO_ARRAYS, Inputs, inputs
from flashtile.numerics.dtypes import EIGHT_BITS
from flashtile.options import ARRAYS, OPTIONS
from flashtile.problem import describe
from flashtile.pytorch import on_cpu
from flashtile.pytorch.interception import (
    can_skip_dispatcher,
    check_storage,
    element_span,
    has_no_torch_function,
    no_modes_active,
    skip_dynamo,
)
from flashtile.pytorch.operands import constants, named_tensors, tensor_names
from flashtile.results import Target

MAX_ENTRIES = 2048  # entries in the cache: a sequence that grows by a token per step would fill the memory
MAX_PER_KEY = 16  # they are tried one by one
_ARRAYS = frozenset(ARRAYS)
_MAY_BE_NONE = {name for name, option in OPTIONS.items() if option.default is None}
Grads = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
_NO_ENTRIES: tuple[Entry, ...] = ()


class Entry:
    """A cached runner and the guard that recognises its calls.

    torch's guard compares types, devices, dtypes, shapes, strides, requires_grad, and dispatch keys. Besides,
    `misalignment` has each address modulo the alignment (None: three zeros), and `spans` the number of elements from
    the first to the last of each tensor in memory, and the bytes of an element.
    """

    __slots__ = (
        *("alignment", "backend", "constants", "guard", "is_qkv", "names", "needs_gradients"),
        *("misalignment", "spans", "runner", "has_duplicates", "skips_dispatcher"),
    )

    def __init__(
        self, backend: str, options: dict[str, Any], runner: Any, tensors: tuple[Tensor, ...], has_duplicates: bool
    ) -> None:
        """tensors: those of the call, without duplicates. has_duplicates: one of them came twice."""
        self.backend, self.runner, self.has_duplicates = backend, runner, has_duplicates
        self.names = tensor_names(options)
        self.constants = constants(options)
        self.needs_gradients = any(x.requires_grad for x in tensors)
        self.guard: Any = None
        if runner.reusable:
            self.guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self.alignment = runner.alignment
            self.misalignment: tuple[int, ...] | None = _misalignment(tensors, runner.alignment)
            self.is_qkv = not (self.names or has_duplicates)
            if self.is_qkv and not any(self.misalignment):
                self.misalignment = None
            self.spans = tuple((element_span(x), x.element_size()) for x in tensors)
            self.skips_dispatcher = can_skip_dispatcher(tensors) and all(map(has_no_torch_function, tensors))

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the runner fits these tensors. Also checks that their storage was not freed or shrunk."""
        if not self.guard.check(*tensors):
            return False
        alignment = self.alignment
        if self.is_qkv:  # most calls; a loop takes longer
            (q, k, v), ((of_q, size), (of_k, _), (of_v, _)) = tensors, self.spans
            at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
            return (
                (
                    (at_q | at_k | at_v) % alignment == 0
                    if self.misalignment is None
                    else self.misalignment == _misalignment(tensors, alignment)
                )
                and len(q.untyped_storage()) >= (q.storage_offset() + of_q) * size
                and len(k.untyped_storage()) >= (k.storage_offset() + of_k) * size
                and len(v.untyped_storage()) >= (v.storage_offset() + of_v) * size
            )
        if self.misalignment != _misalignment(tensors, alignment):
            return False
        for x, (across, size) in zip(tensors, self.spans, strict=True):
            if len(x.untyped_storage()) < (x.storage_offset() + across) * size:
                return False
        return True

    def fits_backward(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the runner can run the backward pass for these tensors, as autograd saved them."""
        return self.guard is not None and not self.has_duplicates and self.fits(tensors)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Inputs:
        """The Inputs of a call, in the caller's layout."""
        if self.names:
            return inputs((q, k, v, *map(options.get, ARRAYS), options.get("seed", 0)))
        return inputs((q, k, v, *NO_ARRAYS, options.get("seed", 0) if options else 0))

    def options_with(self, tensors: Iterable[Any], seed: int) -> dict[str, Any]:
        """The options of a call with these tensors, in the order of `names`, and this seed."""
        options = self.constants | dict(zip(self.names, tensors, strict=True))
        return options | {"seed": seed} if seed else options

    @skip_dynamo
    def run_backward(
        self,
        x: Inputs,
        options: dict[str, Any],
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        bias_grad: bool,
        target: Target | None = None,
    ) -> Grads:
        """Return dq, dk, dv, dbias, dsink, each with its input's shape and dtype, or as the target says, or None."""
        check_storage({"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse}))
        grads = self.runner.backward(x, dout, out, lse, dlse, bias_grad=bias_grad, target=target)
        if grads.dbias is None and grads.dsink is None:
            return grads  # type: ignore[no-any-return]
        dtype, into = target or Target("")
        return (
            *grads[:3],
            _finished(options.get("bias"), grads.dbias, into.dbias, dtype),
            _finished(options.get("sink"), grads.dsink, into.dsink, dtype),
        )


def _finished(x: Any, grad: Tensor | None, buffer: Tensor | None, dtype: str) -> Tensor | None:
    """Return the gradient of x in x's shape and its dtype, or this one if it has more bits; or add it to a buffer."""
    if x is None or grad is None or grad is buffer:
        return grad
    grad = grad.reshape(x.shape)
    if buffer is not None:
        return buffer.add_(grad)
    return grad.to(torch.promote_types(x.dtype, getattr(torch, dtype)) if dtype else x.dtype)


_known: dict[Any, list[Entry]] = {}


def find_or_prepare(
    q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]
) -> tuple[Entry | None, Inputs]:
    """Return an entry for this call, cached or new, and its inputs; raise an error if the call is wrong.

    The entry is None if the backend does not multiply 8-bit tensors directly.
    """
    key, tensors = _key(q, k, v, backend, options)
    entry = _lookup(key, tensors)
    if entry is not None:
        return entry, entry.inputs(q, k, v, options)
    check_storage(named_tensors(q, k, v, options))
    runner, call_inputs = (on_cpu.prepare if q.is_cpu else _prepare_on_gpu)(q, k, v, backend, options)
    if runner is None:
        return None, call_inputs
    entry = Entry(backend, options, runner, tensors, len(tensors) < 3 + len(tensor_names(options)))
    if runner.reusable:
        _store(key, entry)
        call_inputs = entry.inputs(q, k, v, options)
    return entry, call_inputs


def _prepare_on_gpu(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Any, Inputs]:
    """Return a runner and the inputs of a call, as on_cpu.prepare() does."""
    problem = describe(q, k, v, **options)
    row = dispatch.choose(problem, backend, q.device.type)
    if problem.dtype == EIGHT_BITS and not row.eight_bits:
        return None, Inputs.of(problem)
    return row.prepare(problem)


@skip_dynamo
def lookup(q: Any, k: Any, v: Any, backend: str, options: dict[str, Any]) -> Entry | None:
    """Return the cached entry of a call that can skip the dispatcher, or None. The arguments are unchecked."""
    if not no_modes_active() or (options and options.get("descale") is not None):  # entries have a stacked descale
        return None
    try:
        entry = _lookup(*_key(q, k, v, backend, options))
    except (AttributeError, RuntimeError, TypeError):  # no tensors, or unhashable options
        return None
    return entry if entry is not None and entry.skips_dispatcher else None


def _lookup(key: Any, tensors: tuple[Tensor, ...]) -> Entry | None:
    for entry in _known.get(key, _NO_ENTRIES):
        if entry.fits(tensors):
            return entry
    return None


def _store(key: Any, entry: Entry) -> None:
    if key is None:
        return
    if sum(map(len, _known.values())) >= MAX_ENTRIES:
        _known.clear()
    entries = _known.setdefault(key, [])
    entries.append(entry)
    if len(entries) > MAX_PER_KEY:
        del entries[0]


def _misalignment(tensors: tuple[Tensor, ...], alignment: int) -> tuple[int, ...]:
    """Addresses modulo the alignment."""
    return tuple(x.data_ptr() % alignment for x in tensors)


def _key(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the key of a call, and its tensors without duplicates, for the guard.

    The key has lengths too, so that few calls share a key. It is None for a call that cannot be cached: an option is
    wrong or may change its value, or a tensor is nested, which guards do not support.
    """
    precise = None if q.is_cpu or q.dtype is not torch.float32 else tf32()
    if backend.__class__ is not str or v.is_nested:
        return None, (q, k, v)
    distinct = q is not k and k is not v and q is not v
    if distinct and not options:
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
        elif kind is bool or kind is float or kind is torch.dtype:
            key += name, x, kind
        elif (name in _ARRAYS or name == "seed") and isinstance(x, Tensor):
            if x.is_nested:
                return None, (q, k, v)
            key.append(name)
            tensors.append(x)
        elif name != "seed" and (part := part_of_key(name, x)) is not None:
            key += part
        else:
            return None, (q, k, v)
    if distinct and len(tensors) == 3:
        return tuple(key), (q, k, v)
    # A guard does not accept one tensor twice: duplicates are checked once, and the key says where they are.
    first: dict[int, int] = {}
    places = tuple(first.setdefault(id(x), n) for n, x in enumerate(tensors))
    if len(first) < len(tensors):
        return (*key, places), tuple(tensors[n] for n in first.values())
    return tuple(key), tuple(tensors)
