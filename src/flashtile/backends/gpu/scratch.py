"""Scratch: memory for all that a pass needs until its end and nobody after it, made at once."""

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
    """A value of a LaunchSequence, at this place among the others; its parts are told by where they begin.

    All of them have to be known before empty() is.
    """

    def __init__(self, place: int, device: Any) -> None:
        self._place, self._device, self._bytes = place, device, 0

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> Argument:
        offset, count = self._bytes, prod(shape) * dtype.itemsize
        self._bytes += -(-count // UNIT) * UNIT
        return Argument(self._place, offset, partial(_view, offset=offset, count=count, shape=shape, dtype=dtype))

    def maker(self) -> Callable[[], Any]:
        """What makes the memory."""
        return empty((self._bytes // 4,), torch.float32, self._device)


def _view(memory: Any, offset: int, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    return memory.view(torch.uint8)[offset : offset + count].view(dtype).view(shape)


def after(part: Argument, first: int) -> Argument:
    """What is left of a part, a vector of numbers of 32 bits, from this number on."""
    return Argument(part.place, part.offset + 4 * first, lambda memory: part.of(memory)[first:])
