"""Tensors on the CPU <-> NumPy arrays, the same memory both ways.

Not by Tensor.numpy() and torch.from_numpy(), after which no one may resize the storage of the tensor any more.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashtile.numerics.dtypes import BFLOAT16, Array
from flashtile.pytorch import pages

_GUARDS: Any = torch._C._dynamo.guards


class _Lent(ctypes.Array):  # type: ignore[type-arg]
    """The memory of a tensor, which it keeps; arrays over that memory keep this. NumPy is to look at no end of it."""

    _type_ = ctypes.c_char
    _length_ = sys.maxsize
    tensor: Tensor


class _Made(_Lent):
    """Likewise, of a tensor that nobody else has yet."""


def to_numpy(x: Tensor) -> Array:
    """A view of a CPU tensor; bfloat16, which NumPy lacks, as flashtile's record of its bits."""
    return _array(x, _Lent)


def to_torch(x: Array) -> Tensor:
    """A contiguous tensor with the values of an array: the one that Memory made for it, or a copy."""
    found = x.base
    while isinstance(found, np.ndarray):
        found = found.base
    if isinstance(found, _Made) and x.flags.c_contiguous and x.nbytes == found.tensor.nbytes:
        tensor = found.tensor
        return tensor if tensor.shape == x.shape else tensor.resize_(x.shape)  # no view, for which autograd has rules
    copy = _empty(x.shape, x.dtype)
    to_numpy(copy)[...] = x
    return copy


class Memory:
    """Makes arrays as the module numpy does, but in tensors, which to_torch() gives back."""

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any) -> Array:
        return _array(_empty(shape, np.dtype(dtype)), _Made)

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
        made = Memory.empty(shape, dtype)
        made.fill(0)
        return made


def _array(x: Tensor, lent: type[_Lent]) -> Array:
    dtype = _dtype(x.dtype)
    if not x.numel():  # it may lie nowhere
        return np.empty(tuple(x.shape), dtype)
    memory: Any = lent.from_address(x.data_ptr())
    memory.tensor = x
    strides = None if x.is_contiguous() else [n * dtype.itemsize for n in x.stride()]
    array: Array = np.ndarray(x.shape, dtype, memory, 0, strides)
    return array


@cache
def _dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """A TypeError says so of those that NumPy lacks, though the ml_dtypes package may have taught it their names."""
    if dtype is torch.bfloat16:
        return BFLOAT16
    found = np.dtype(str(dtype).removeprefix("torch."))
    if found.isbuiltin != 1:
        raise TypeError(f"NumPy has no {dtype}")
    return found


@cache
def _kind(dtype: np.dtype[Any]) -> torch.dtype:
    """The other way round."""
    found: torch.dtype = torch.bfloat16 if dtype == BFLOAT16 else getattr(torch, dtype.name)
    return found


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    made: Tensor = maker(shape, _kind(dtype))()
    if made.nbytes >= pages.LARGE:
        pages.make_large(made.data_ptr(), made.nbytes)
    return made


@lru_cache(1024)
def maker(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Any]:
    """What makes such tensors, contiguous, past the dispatcher."""
    return partial(_GUARDS._empty_strided_cpu, shape, torch.empty(shape, device="meta").stride(), dtype)
