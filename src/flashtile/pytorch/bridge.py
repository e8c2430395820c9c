"""Tensors on the CPU <-> NumPy arrays, the same memory both ways.

Not by Tensor.numpy() and torch.from_numpy(), after which no one may resize the storage of the tensor any more.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashtile.host.arrays import Arrays
from flashtile.numerics.dtypes import BFLOAT16, Array, name_of
from flashtile.pytorch import pages
from flashtile.pytorch.operands import seed_value

_GUARDS: Any = torch._C._dynamo.guards


class _BorrowedMemory(ctypes.Array):  # type: ignore[type-arg]
    """The memory of a tensor, which it keeps; arrays over that memory keep this. NumPy is to look at no end of it."""

    _type_ = ctypes.c_char
    _length_ = sys.maxsize
    tensor: Tensor


def to_numpy(x: Tensor) -> Array:
    """A view of a CPU tensor; bfloat16, which NumPy lacks, as flashtile's record of its bits."""
    dtype = _dtype(x.dtype)
    if not x.numel():  # it may lie nowhere
        return np.empty(tuple(x.shape), dtype)
    memory: Any = _BorrowedMemory.from_address(x.data_ptr())
    memory.tensor = x
    strides = None if x.is_contiguous() else [n * dtype.itemsize for n in x.stride()]
    array: Array = np.ndarray(x.shape, dtype, memory, 0, strides)
    return array


def to_torch(x: Array) -> Tensor:
    """A contiguous tensor with the values of an array."""
    copy: Tensor = maker(x.shape, name_of(x.dtype))()
    to_numpy(copy)[...] = x
    return copy


@cache
def _dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """A TypeError says so of those that NumPy lacks, though the ml_dtypes package may have taught it their names."""
    if dtype is torch.bfloat16:
        return BFLOAT16
    found = np.dtype(str(dtype).removeprefix("torch."))
    if found.isbuiltin != 1:
        raise TypeError(f"NumPy has no {dtype}")
    return found


@lru_cache(1024)
def maker(shape: tuple[int, ...], name: str, q_dtype: Any = None) -> Callable[[], Any]:
    """What makes contiguous tensors like this, past the dispatcher."""
    dtype = getattr(torch, name)
    make = partial(_GUARDS._empty_strided_cpu, shape, torch.empty(shape, device="meta").stride(), dtype)
    if prod(shape) * dtype.itemsize < pages.LARGE:
        return make

    def make_large() -> Any:
        made = make()
        pages.make_large(made.data_ptr(), made.nbytes)
        return made

    return make_large


def _contiguous(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % x.element_size() else x


TENSORS = Arrays(
    address=Tensor.data_ptr,
    strides=Tensor.stride,
    contiguous=_contiguous,
    maker=maker,
    clear=Tensor.zero_,
    to_numpy=to_numpy,
    from_numpy=to_torch,
    number=seed_value,
    threads=torch.get_num_threads,
)
