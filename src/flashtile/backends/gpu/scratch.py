"""Scratch: one allocation for all the temporary memory of a pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch

from flashtile.backends.gpu.kernel_launch import Argument
from flashtile.backends.gpu.tensors import empty

UNIT = 512  # bytes: parts are aligned as torch's own tensors are


class Scratch:
    """A value of a LaunchSequence, by its position, divided into parts by their offsets.

    All parts have to be added before maker() is called.
    """

    def __init__(self, position: int, device: Any) -> None:
        self._position, self._device, self._bytes = position, device, 0

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> Argument:
        offset, count = self._bytes, prod(shape) * dtype.itemsize
        self._bytes += -(-count // UNIT) * UNIT
        return Argument(self._position, offset, partial(_view, offset=offset, count=count, shape=shape, dtype=dtype))

    def maker(self) -> Callable[[], Any]:
        """Return what allocates the memory."""
        return empty((self._bytes // 4,), torch.float32, self._device)


def _view(memory: Any, offset: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    return memory.view(torch.uint8)[offset : offset + count].view(dtype).view(shape)


def tail(part: Argument, first: int) -> Argument:
    """The rest of a part, a vector of 32-bit numbers, from element `first` on."""
    return Argument(part.position, part.offset + 4 * first, lambda memory: part.of(memory)[first:])
