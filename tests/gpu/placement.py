"""Tensors placed in poisoned memory: with the strides of an array, and poison in the gaps and on either side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from flashtile.pytorch import calls
from tests.pytorch.samples import tensor


class Fence(NamedTuple):
    """Elements of poison before and after a tensor, in the same allocation."""

    before: int
    behind: int


NO_FENCE = Fence(0, 0)
FENCE = Fence(128, 128)  # keeps the alignment of the allocation
UNALIGNED = Fence(1, 127)


def poison(dtype: torch.dtype) -> Any:
    """Contents that show if they are used: NaN; an enormous length; for a mask, True."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


class Placed(NamedTuple):
    """A tensor, the buffer that it is a part of, and the buffer's contents."""

    tensor: Tensor
    buffer: Tensor
    before: Tensor

    def unchanged(self) -> bool:
        return same_bits(self.buffer, self.before)


def place(x: np.ndarray[Any, Any], device: str, fence: Fence = NO_FENCE) -> Placed:
    """x on a device with its NumPy strides; torch has no negative strides, so such an array is copied."""
    values = tensor(x)
    steps = [step // x.itemsize for step in x.strides]
    if not x.size or min(steps, default=0) < 0:
        steps = list(values.stride())
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, steps, strict=True)) if x.size else 0
    size = fence.before + extent + fence.behind
    buffer = torch.full((size,), poison(values.dtype), dtype=values.dtype, device=device)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in steps)  # the rest is the same memory
    view = buffer.as_strided(values[once].shape, steps, fence.before)
    view.copy_(values[once])
    return Placed(view.expand(x.shape), buffer, buffer.clone())


def same_bits(x: Tensor, y: Tensor) -> bool:
    """NaN equals NaN here, and -0 is not 0."""
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))


def _bits(x: Tensor) -> Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(whole[x.element_size()])


class Canaries:
    """Every allocated buffer, with the poison on either side of it."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def allocate(self, shape: Any, dtype: torch.dtype, device: Any, fill: Any) -> Tensor:
        n = int(np.prod(shape, dtype=np.int64))
        buffer = torch.full((FENCE.before + n + FENCE.behind,), poison(dtype), dtype=dtype, device=device)
        self.buffers.append((buffer, n))
        inside = buffer[FENCE.before : FENCE.before + n]
        if fill is not None:
            inside.fill_(fill)
        return inside.view(tuple(shape))

    def caught(self, x: Tensor) -> bool:
        """Whether x lies in one of these buffers."""
        return any(x.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b, _ in self.buffers)

    def untouched(self) -> bool:
        """Whether both sides of every buffer are still poison."""
        return all(
            same_bits(side, torch.full_like(side, poison(side.dtype)))
            for buffer, n in self.buffers
            for side in (buffer[: FENCE.before], buffer[FENCE.before + n :])
        )


@contextmanager
def unprepared() -> Iterator[None]:
    """Within it, calls do not find prepared calls, which are bound to the functions of their time."""
    with mock.patch.object(calls, "_known", {}):
        yield


@contextmanager
def canaries() -> Iterator[Canaries]:
    """Within it, new tensors are poison and lie between poison."""
    birds = Canaries()

    def like(fill: Any) -> Any:
        def new(self: Tensor, *size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
            shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            return birds.allocate(shape, dtype or self.dtype, device or self.device, fill)

        return new

    plainly = torch.empty

    def empty(*size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        if torch.device(device or "cpu").type == "meta":
            return plainly(*size, dtype=dtype, device=device)  # it has no memory
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return birds.allocate(shape, dtype or torch.get_default_dtype(), device or "cpu", None)

    plainly_strided = torch.empty_strided

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        if torch.device(device or "cpu").type == "meta" or tuple(stride) != plainly(size, device="meta").stride():
            return plainly_strided(size, stride, dtype=dtype, device=device)
        return empty(size, dtype=dtype, device=device)

    def on_current(size: Any, stride: Any, dtype: Any) -> Tensor:
        return empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))

    def empty_like(x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        return birds.allocate(x.shape, dtype or x.dtype, x.device, None)

    with (
        unprepared(),
        mock.patch.object(torch.Tensor, "new_empty", like(None), create=True),
        mock.patch.object(torch.Tensor, "new_zeros", like(0), create=True),
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_strided", empty_strided),
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cuda", on_current),
        mock.patch.object(torch, "empty_like", empty_like),
    ):
        yield birds
