"""Checks before a call skips the dispatcher.

Must a mode, subclass or transform see the call, and do its tensors still hold their values?
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.nn import functional

from flashtile.errors import ShapeError, UnsupportedError

F = TypeVar("F", bound=Callable[..., object])

_keys_of = torch._C._dispatch_keys
_keys_of_thread = torch._C._dispatch_tls_local_include_set
_overridden = torch.overrides.has_torch_function
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocast = torch._C._is_any_autocast_enabled
_PLAIN = 0  # the dispatch keys of any plain tensor on a CPU or GPU
for _key in (
    *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
    *("ADInplaceOrView", "BackendSelect"),
):
    _PLAIN |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key)).raw_repr()


def can_skip_dispatcher(tensors: Iterable[Tensor]) -> bool:
    """Whether no mode, subclass or transform must see a call of these tensors.

    vmap, fake tensors, subclasses, modes and tracers all show as dispatch keys of the tensors or of the thread. The
    caller handles autograd and autocast.
    """
    keys: int = _keys_of_thread().raw_repr()
    for x in tensors:
        keys |= _keys_of(x).raw_repr()
    return not keys & ~_PLAIN and not _overridden(tensors)


def readable(x: Tensor) -> bool:
    """Whether the host can read the values of x without cost, and without making them constants of a graph."""
    return x.is_cpu and not torch.compiler.is_compiling() and can_skip_dispatcher((x,))


def has_no_torch_function(x: Tensor) -> bool:
    """Whether x's class has no __torch_function__, not even one that is disabled for the moment."""
    return x.__class__ is Tensor or x.__class__.__torch_function__ is torch._C._disabled_torch_function_impl


def no_modes_active() -> bool:
    """Whether no mode, forward-mode derivative or autocast is active. These may not show on tensors."""
    return not (
        _function_modes()
        or _dispatch_modes()
        or _autocast()
        or forward_ad._current_level >= 0
        or (functional.scaled_dot_product_attention is not _SDPA and context_parallel_mesh() is not None)
    )


_mode_stack: Any = torch.overrides._get_current_function_mode_stack
_SDPA: Any = torch._C._nn.scaled_dot_product_attention
# The modules in which torch's context_parallel() records replaced functions, by release.
CONTEXT_PARALLEL = (
    "torch.distributed.tensor.experimental._attention",
    "torch.distributed.tensor.experimental._context_parallel._attention",
)
_answering = threading.local()


def context_parallel_mesh() -> Any:
    """The mesh of torch's context_parallel(), or None outside it.

    It replaces torch's own attention, or intercepts it by a mode.
    """
    if getattr(_answering, "now", False):
        return None
    current: Any = functional.scaled_dot_product_attention
    modules = [sys.modules[name] for name in CONTEXT_PARALLEL if name in sys.modules]
    if any(current in getattr(module, "_replaced_functions", ()) for module in modules):
        return inspect.getclosurevars(current).nonlocals["device_mesh"]
    for mode in _mode_stack():
        if type(mode).__name__ == "DistributeFunction" and type(mode).__module__ in CONTEXT_PARALLEL:
            return mode._device_mesh
    return None


@contextmanager
def answering() -> Iterator[None]:
    """Run calls inside torch's context_parallel() as they are: those that together answer one of its calls."""
    before = getattr(_answering, "now", False)
    _answering.now = True
    try:
        yield
    finally:
        _answering.now = before


def reject_shards() -> None:
    """Raise an error inside torch's context_parallel(), where each rank has only a part of each sequence."""
    if context_parallel_mesh() is not None:
        raise UnsupportedError(
            "q, k, v: expected whole sequences, got a rank's part of them, as inside torch's context_parallel(); "
            "there, call attention() without torch.compile, or flashtile.distributed.attention()"
        )


_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def skip_dynamo(function: F) -> F:
    """Keep torch.compile from tracing a function that is called after a graph break."""
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def element_span(x: Any) -> int:
    """The number of elements from the first to the last of a tensor in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def check_storage(tensors: Mapping[str, Any]) -> None:
    """Check that the storage of each tensor, which may have been freed or shrunk, still holds all of it."""
    for name, x in tensors.items():
        size, begin = len(x.untyped_storage()), x.storage_offset() * x.element_size()
        if x.is_contiguous() and begin + x.nbytes <= size:  # the fast case, because every backward pass checks
            continue
        needed = begin + element_span(x) * x.element_size()
        if x.numel() and size < needed:
            raise ShapeError(f"{name}: expected a storage of at least {needed} bytes, for its shape, got one of {size}")
