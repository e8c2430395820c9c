"""Views of CPU tensors as NumPy arrays, and tensors from NumPy arrays.

Tensor.numpy() is no option: it makes the tensor's storage unresizable.
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

from flashtile.host.arrays import Arrays, add
from flashtile.host.memory_order import Order
from flashtile.numerics.dtypes import BFLOAT16, Array, name_of
from flashtile.pytorch import pages
from flashtile.pytorch.operands import seed_value

_GUARDS: Any = torch._C._dynamo.guards


class _BorrowedMemory(ctypes.Array):  # type: ignore[type-arg]
    """The memory of a tensor, which it keeps alive. Its length is unlimited, so that NumPy accepts any strides."""

    _type_ = ctypes.c_char
    _length_ = sys.maxsize
    tensor: Tensor


def to_numpy(x: Tensor) -> Array:
    """View a CPU tensor as an array; bfloat16, which NumPy lacks, as the record dtype BFLOAT16."""
    dtype = _dtype(x.dtype)
    if not x.numel():  # it may have no address
        return np.empty(tuple(x.shape), dtype)
    memory: Any = _BorrowedMemory.from_address(x.data_ptr())
    memory.tensor = x
    strides = None if x.is_contiguous() else [n * dtype.itemsize for n in x.stride()]
    array: Array = np.ndarray(x.shape, dtype, memory, 0, strides)
    return array


def to_torch(x: Array, order: Order | None = None) -> Tensor:
    """Copy an array to a contiguous tensor, or to a dense one whose axes lie in memory in this order."""
    copy: Tensor = maker(x.shape, name_of(x.dtype), None, order)()
    to_numpy(copy)[...] = x
    return copy


@cache
def _dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Raise a TypeError for dtypes that NumPy lacks, even if the ml_dtypes package has registered their names."""
    if dtype is torch.bfloat16:
        return BFLOAT16
    numpy_dtype = np.dtype(str(dtype).removeprefix("torch."))
    if numpy_dtype.isbuiltin != 1:
        raise TypeError(f"NumPy has no {dtype}")
    return numpy_dtype


@lru_cache(1024)
def maker(shape: tuple[int, ...], name: str, q_dtype: Any = None, order: Order | None = None) -> Callable[[], Any]:
    """Return a function that makes dense tensors of this shape, dtype and order of axes, without the dispatcher."""
    dtype, axes = getattr(torch, name), order or (*range(len(shape)),)
    like = torch.empty([shape[axis] for axis in axes], device="meta").permute([axes.index(n) for n in range(len(axes))])
    make = partial(_GUARDS._empty_strided_cpu, shape, like.stride(), dtype)
    if prod(shape) * dtype.itemsize < pages.LARGE:
        return make

    def make_large() -> Any:
        x = make()
        pages.make_large(x.data_ptr(), x.nbytes)
        return x

    return make_large


def _contiguous(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % x.element_size() else x


def _add(x: Tensor, y: Array) -> Tensor:
    add(to_numpy(x), y)
    return x


TORCH = Arrays(
    address=Tensor.data_ptr,
    strides=Tensor.stride,
    contiguous=_contiguous,
    maker=maker,
    clear=Tensor.zero_,
    add=_add,
    to_numpy=to_numpy,
    from_numpy=to_torch,
    seed_value=seed_value,
    threads=torch.get_num_threads,
)
