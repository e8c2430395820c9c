"""Tensors on the CPU <-> NumPy arrays, the same memory both ways.

Not by Tensor.numpy() and torch.from_numpy(), after which no one may resize the storage of the tensor any more.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashtile.dtypes import BFLOAT16, Array


class _Lent:
    """The memory of a tensor as NumPy is told of it; arrays over it hold this, and this holds the tensor."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, x: Tensor, dtype: np.dtype[Any]) -> None:
        self.tensor = x
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "strides": tuple(n * dtype.itemsize for n in x.stride()),
        }


class _Made(_Lent):
    """Likewise, of a tensor that nobody else has yet."""

    __slots__ = ()


@cache
def _dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """That of the bits; NumPy lacks bfloat16, and its TypeError says so of others."""
    return np.dtype(np.uint16 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch."))


def to_numpy(x: Tensor) -> Array:
    """A view of a CPU tensor; bfloat16, which NumPy lacks, as flashtile's record of its bits."""
    return _array(x, _Lent)


def _array(x: Tensor, lent: type[_Lent]) -> Array:
    dtype = _dtype(x.dtype)
    # An empty tensor may lie nowhere, and at no address NumPy would not see this interface.
    array: Array = np.asarray(lent(x, dtype)) if x.numel() else np.empty(tuple(x.shape), dtype)
    return array.view(BFLOAT16) if x.dtype is torch.bfloat16 else array


def to_torch(x: Array) -> Tensor:
    """A contiguous tensor with the values of an array: the one that Memory made for it, or a copy."""
    found = x.base
    while isinstance(found, np.ndarray):
        found = found.base
    if isinstance(found, _Made) and x.flags.c_contiguous and x.nbytes == found.tensor.nbytes:
        return found.tensor.resize_(x.shape)  # no view, which autograd would treat otherwise
    copy = _empty(x.shape, x.dtype)
    to_numpy(copy)[...] = x
    return copy


class Memory:
    """Makes arrays as the module numpy does, but in tensors, which to_torch() gives back."""

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any) -> Array:
        return _made(_empty(shape, np.dtype(dtype)))

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
        return _made(_empty(shape, np.dtype(dtype)).zero_())


def _made(x: Tensor) -> Array:
    return _array(x, _Made)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    kind = torch.bfloat16 if dtype == BFLOAT16 else getattr(torch, dtype.name)
    return torch.empty(shape, dtype=kind, device="cpu")
