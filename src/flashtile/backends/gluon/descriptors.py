"""TMA descriptors, which tell the copy engine the layout of a tensor and of its tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtile.backends.gpu.tensors import Result, maker_like
from flashtile.numerics.dtypes import EIGHT_BITS, name_of


def descriptor_maker(
    x: Any, box: list[int], packed_heads: int | None = None, swizzled: bool = True
) -> Callable[[Any], Any]:
    """Return what makes descriptors of tensors laid out like x (rank 4). packed_heads become an axis of their own.

    swizzled: in shared memory, as the matrix unit needs it.
    """
    shape, stride = list(x.shape), list(x.stride())
    if packed_heads is not None:
        shape = [shape[0], shape[1] // packed_heads, shape[2], packed_heads, shape[3]]
        stride = [stride[0], stride[1] * packed_heads, stride[2], stride[1], 1]
    stride = [s if n > 1 else 16 for n, s in zip(shape, stride, strict=True)]  # the stride of an axis of 1 is not used
    stride[-1] = 1
    layout = gl.NVMMASharedLayout.get_default_for(box, _element(x.dtype))
    if not swizzled:
        layout = gl.NVMMASharedLayout(0, 8 * x.element_size(), len(box))
    return maker_like(TensorDescriptor(x, shape, stride, box, layout))


def _element(dtype: Any) -> Any:
    name = name_of(dtype)
    return gl.float8e4nv if name == EIGHT_BITS else getattr(gl, name)


def outline_of(result: Result, batch: int, heads: int, n: int, dim: int) -> Any:
    """A result as a tensor of rank 4 without memory."""
    return torch.empty_strided((batch, heads, n, dim), (*result.strides, 1), dtype=result.dtype, device="meta")
