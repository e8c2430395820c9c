"""Device functions as plain Python: those that only count tiles run on integers, without a GPU or a compiler."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl

WIDE = 1 << 39  # an integer from here on is of 64 bits; those of steady.py are


class Number(int):
    """An integer, or a truth, as a scalar tensor."""

    @property
    def dtype(self) -> Any:
        return tl.int64 if self >= WIDE else tl.int32

    def to(self, _dtype: Any) -> Number:
        return self


def _kept(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: Number, *others: Any) -> Any:
        found = plain(self, *others)
        return found if found is NotImplemented else Number(found)

    return method


WORDS_OF_INT = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "neg", "rshift", "and", "or"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
for _word in WORDS_OF_INT:
    setattr(Number, f"__{_word}__", _kept(f"__{_word}__"))
Number.__hash__ = int.__hash__  # type: ignore[method-assign]


class Pointer:
    """To one of some numbers."""

    def __init__(self, numbers: Any, at: int = 0) -> None:
        self._numbers, self._at = numbers, at

    def __add__(self, by: int) -> Pointer:
        return Pointer(self._numbers, self._at + by)

    def read(self) -> Number:
        return Number(self._numbers[self._at])


WORDS = SimpleNamespace(
    minimum=lambda a, b: Number(min(a, b)),
    maximum=lambda a, b: Number(max(a, b)),
    where=lambda condition, a, b: Number(a if condition else b),
    cdiv=lambda a, b: Number(-(-a // b)),
    to_tensor=Number,
    load=operator.methodcaller("read"),
    int32=tl.int32,
    int64=tl.int64,
)


def on_integers(function: Any) -> Callable[..., Any]:
    """A jitted function, and all that it calls, with Numbers for tensors."""
    code = function.fn.__code__
    names = {name: function.fn.__globals__[name] for name in code.co_names if name in function.fn.__globals__}
    return FunctionType(code, {name: _as_plain(x) for name, x in names.items()})


def _as_plain(x: Any) -> Any:
    if hasattr(x, "fn") and hasattr(x.fn, "__code__"):
        return on_integers(x)
    if isinstance(x, tl.constexpr):
        return x.value
    return WORDS if getattr(x, "__name__", "").endswith(".language") else x


def numbers(values: Any) -> Any:
    """A named tuple of what a kernel is given: constants and integers as Numbers, arrays as Pointers."""
    return type(values)(*map(_given, values))


def _given(x: Any) -> Any:
    x = x.value if isinstance(x, tl.constexpr) else x
    return Pointer(x) if isinstance(x, np.ndarray) else Number(x) if type(x) is int else x
