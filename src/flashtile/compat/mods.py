"""FlexAttention's functions of positions: evaluated as torch does, by vmap, and what they have captured."""

import builtins
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SLAB = 1 << 22  # pairs that are evaluated at a time
LARGEST = 1 << 30  # pairs of a mask or bias that is stored for all of them


class _Indexing(TorchFunctionMode):
    """Index by scalar tensors without reading them, which vmap forbids."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(n, Tensor) for n in index) and all(
                isinstance(n, Tensor) or type(n) is int for n in index
            ):
                numbers = [n if isinstance(n, Tensor) else torch.tensor(n, device=x.device) for n in index]
                return torch.ops.aten.index(x, numbers)
        return func(*args, **(kwargs or {}))


def on_pairs(function: Callable[..., Any], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
    """Return function(b, h, i, j) for all combinations of these positions, (batch, heads, queries, keys).

    An axis on which the result does not depend has length 1. The function sees scalars, as in torch.
    """
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=axes)
    with _Indexing():
        found = function(b, h, i, j)
    return _compact(found) if isinstance(found, Tensor) else tuple(map(_compact, found))


def at_pairs(function: Callable[..., Any], *positions: Tensor) -> Any:
    """The same for positions that go together: the n-th of each, (n,). More arguments may come first."""
    with _Indexing():
        return torch.vmap(function)(*positions)


def _compact(x: Tensor) -> Tensor:
    """Keep one of the equal values along an axis that vmap has expanded."""
    for axis in range(4):
        if x.shape[axis] > 1 and x.stride(axis) == 0:
            x = x.narrow(axis, 0, 1)
    return x


class Captured:
    """What a function has captured: constants, tensors, functions, and the globals that it names.

    Tensors on a CPU are compared by their values, which are copied, others by identity and version: a change made
    behind autograd's back (x.data) is not seen on a GPU.
    """

    def __init__(self, function: Any) -> None:
        """Raise UnknownError if something captured could change unseen, such as an attribute of an object."""
        self._found = [_freeze(x) for x in _leaves(function, set())]

    def is_unchanged(self, function: Any) -> bool:
        try:
            now = list(_leaves(function, set()))
        except UnknownError:
            return False
        return len(now) == len(self._found) and all(_matches(a, b) for a, b in zip(self._found, now, strict=True))


class UnknownError(Exception):
    """Something captured could change unseen."""


_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
_FIXED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_LIBRARIES = {"torch", "math", "numpy", "operator", "functools", "builtins"}


def _leaves(x: Any, visited: set[int]) -> Iterator[Any]:
    if isinstance(x, _CONSTANTS):
        yield type(x), x
    elif type(x) in (Tensor, torch.nn.Parameter, np.ndarray):
        yield x
    elif type(x) in (tuple, list, dict):
        yield type(x), len(x)
        for item in x.items() if type(x) is dict else x:
            yield from _leaves(item, visited)
    elif isinstance(x, functools.partial):
        yield from _leaves((x.func, x.args, x.keywords), visited)
    elif isinstance(x, types.FunctionType):
        if id(x) not in visited:
            visited.add(id(x))
            yield x.__code__, None
            yield from _leaves([x.__defaults__, x.__kwdefaults__], visited)
            yield from _leaves([_content(cell) for cell in x.__closure__ or ()], visited)
            if x.__module__ is None or x.__module__.partition(".")[0] not in _LIBRARIES:
                for name in _names(x.__code__):
                    if name in x.__globals__:
                        yield from _leaves(x.__globals__[name], visited)
    elif _belongs_to_library(x):
        yield x, None
    else:
        raise UnknownError


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        raise UnknownError from None


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that a function and those inside it may name."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _belongs_to_library(x: Any) -> bool:
    if isinstance(x, types.ModuleType):
        return x.__name__.partition(".")[0] in _LIBRARIES
    if isinstance(x, type):
        return x.__module__.partition(".")[0] in _LIBRARIES
    return isinstance(x, _FIXED) or getattr(builtins, getattr(x, "__name__", ""), None) is x


def _freeze(x: Any) -> tuple[Any, ...]:
    if isinstance(x, np.ndarray):
        return x, x.copy()
    if not isinstance(x, Tensor):
        return tuple(x)
    if x.is_cpu:
        return weakref.ref(x), x.requires_grad, x.detach().clone()
    if x.is_inference():  # it has no version
        raise UnknownError
    return weakref.ref(x), x.requires_grad, x.data_ptr(), x._version


def _matches(frozen: tuple[Any, ...], x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return isinstance(frozen[0], np.ndarray) and frozen[1].dtype == x.dtype and np.array_equal(frozen[1], x)
    if not isinstance(x, Tensor):
        return not isinstance(frozen[0], weakref.ref | np.ndarray) and bool(frozen == x)
    if not isinstance(frozen[0], weakref.ref) or frozen[1] != x.requires_grad:
        return False
    if len(frozen) == 3:
        old = frozen[2]
        return x.is_cpu and old.dtype == x.dtype and torch.equal(old, x.detach())
    return frozen[2:] == (x.data_ptr(), x._version) and frozen[0]() is x
