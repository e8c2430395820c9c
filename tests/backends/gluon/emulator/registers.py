"""What a program holds in registers: numbers, blocks and pointers."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl

WIDE = 1 << 39  # integers from here on have 64 bits, as those of unspecialized.py do
TORCH = {
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.int16: torch.int16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
}
TRITON = {of_torch: of_triton for of_triton, of_torch in TORCH.items()}


class MisuseError(RuntimeError):
    """Something that is wrong on a GPU, or may be."""


class Number(int):
    """An integer or a boolean, as a scalar tensor. Division rounds towards 0 as in C; it never overflows."""

    @property
    def dtype(self) -> Any:
        return tl.int64 if self >= WIDE else tl.int32

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if not dtype.is_floating():
            return self
        if not bitcast:
            return Block(torch.tensor(int(self), dtype=TORCH[dtype]))
        whole, real = ("<q", "<d") if dtype == tl.float64 else ("<i", "<f")
        return Block(torch.tensor(struct.unpack(real, struct.pack(whole, self))[0], dtype=TORCH[dtype]))

    def __floordiv__(self, by: Any) -> Any:
        return NotImplemented if isinstance(by, Block) else _quotient_of_numbers(self, by)

    def __rfloordiv__(self, x: Any) -> Any:
        return _quotient_of_numbers(x, self)

    def __mod__(self, by: Any) -> Any:
        return NotImplemented if isinstance(by, Block) else self - self // by * by

    def __rmod__(self, x: Any) -> Any:
        return Number(x) % self


def _quotient_of_numbers(x: Any, y: Any) -> Number:
    size = abs(int(x)) // abs(int(y))
    return Number(size if (x < 0) == (y < 0) else -size)


def _kept(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: Number, *others: Any) -> Any:
        found = plain(self, *others)
        return found if found is NotImplemented else Number(found)

    return method


_OF_INT = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "neg"),
    *("rshift", "lshift", "and", "rand", "or", "ror", "xor", "rxor"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
for _word in _OF_INT:
    setattr(Number, f"__{_word}__", _kept(f"__{_word}__"))
Number.__hash__ = int.__hash__  # type: ignore[method-assign]


class Block:
    """A tensor in registers, or a real number, with no axes."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @property
    def shape(self) -> list[int]:
        return list(self.x.shape)

    @property
    def dtype(self) -> Any:
        return TRITON[self.x.dtype]

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None, shape=self.shape, element_ty=self.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> Block:
        wanted = TORCH[dtype]
        return Block(self.x.contiguous().view(wanted) if bitcast else self.x.to(wanted))

    def item(self) -> Any:
        (found,) = self.x.flatten().tolist()
        return Number(found) if isinstance(found, int) else Block(self.x.reshape(()))

    def __getitem__(self, at: Any) -> Block:
        return Block(self.x[at])

    def __neg__(self) -> Block:
        return Block(-self.x)

    def __bool__(self) -> bool:
        return bool(self.x)

    __hash__ = None  # type: ignore[assignment]


def as_torch(x: Any) -> Any:
    """A value as torch takes it."""
    if isinstance(x, Block):
        return x.x
    if not isinstance(x, int | float | torch.Tensor):
        raise MisuseError(f"{type(x).__name__} is no number")
    return int(x) if isinstance(x, Number) else x


def as_tensor(x: Any) -> torch.Tensor:
    """A value as a torch tensor."""
    x = as_torch(x)
    return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.int32 if isinstance(x, int) else None)


def _quotient(x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="trunc")


def _between(op: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Block, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Block(op(self.x, as_torch(other)))

    return method


def _from_the_right(op: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Block, other: Any) -> Any:
        return Block(op(as_tensor(other), self.x))

    return method


_OF_TENSORS = ("add", "sub", "mul", "truediv", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne", "rshift")
for _word in (*_OF_TENSORS, "lshift", "floordiv", "mod"):
    _op = {"and": operator.and_, "or": operator.or_, "floordiv": _quotient, "mod": torch.fmod}.get(_word)
    _op = _op or getattr(operator, _word)
    setattr(Block, f"__{_word}__", _between(_op))
    setattr(Block, f"__r{_word}__", _from_the_right(_op))


class Pointer:
    """A pointer to elements of a tensor in memory; out of bounds there is nothing to read or write."""

    def __init__(self, of: torch.Tensor, at: Any = 0) -> None:
        self._of, self._at = of, at
        self.dtype = SimpleNamespace(element_ty=TRITON[of.dtype])

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self._of, self._at + by)

    __radd__ = __add__

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self._of, self._at[at])

    @property
    def address(self) -> tuple[int, int]:
        return self._of.data_ptr(), int(as_torch(self._at))

    def read(self, mask: Any = None, other: Any = None) -> Any:
        at, mask = self._places(mask)
        found = self._flat()[at]
        if mask is not None:
            found = torch.where(mask, found, torch.tensor(0 if other is None else other, dtype=found.dtype))
        if found.ndim:
            return Block(found)
        return Block(found) if found.is_floating_point() else Number(int(found))

    def write(self, x: Any, mask: Any = None) -> None:
        at, mask = self._places(mask)
        x = as_tensor(x).to(self._of.dtype)
        if mask is None:
            self._flat()[at] = x
        else:
            self._flat()[at[mask]] = x.expand(at.shape)[mask]

    def _flat(self) -> torch.Tensor:
        x = self._of
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        return x.as_strided((span,), (1,))

    def _places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        at = as_tensor(self._at).to(torch.int64)
        span = self._flat().numel()
        if mask is not None:
            mask = as_tensor(mask).to(torch.bool)
            at, mask = torch.broadcast_tensors(at, mask)
        outside = (at < 0) | (at >= span)
        if mask is not None:
            outside = outside & mask
        if outside.any():
            raise MisuseError(f"{at[outside].tolist()[:4]} of a tensor {tuple(self._of.shape)} that spans {span}")
        return (at if mask is None else torch.where(mask, at, 0)), mask


def argument(x: Any) -> Any:
    """An argument of a kernel:

    constants as they are, integers as Numbers, tensors as Pointers, tuples field by field.
    """
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, tuple):
        return type(x)(*map(argument, x))
    if isinstance(x, np.ndarray):
        return Pointer(torch.from_numpy(x))
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    return Number(x) if type(x) is int else x
