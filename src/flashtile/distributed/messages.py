"""Messages: what the methods ask of a channel, and rows of tensors as contiguous tensors to be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype]


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> list[Tensor]:
        """What arrived."""


class Transport(Protocol):
    """What the methods need of a channel."""

    def transfer(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], step: str) -> Pending: ...

    def reduce(self, x: Tensor, op: str, step: str) -> Tensor: ...


def post(
    channel: Transport,
    like: Tensor,
    parts: Mapping[int, Sequence[Tensor]],
    shapes: Mapping[int, Sequence[Shape]],
    step: str,
) -> Callable[[], dict[int, list[Tensor]]]:
    """Begin to send tensors to some ranks, and to receive tensors of these shapes from some. Returns what waits."""
    received = {rank: [like.new_empty(shape, dtype=dtype) for shape, dtype in each] for rank, each in shapes.items()}
    pending = channel.transfer(
        [(rank, x) for rank, each in parts.items() for x in each],
        [(rank, x) for rank, each in received.items() for x in each],
        step,
    )

    def finish() -> dict[int, list[Tensor]]:
        pending.wait()
        return received

    return finish


def rows(x: Tensor, axis: int, some: Sequence[slice]) -> Tensor:
    """Some rows of a tensor, contiguous."""
    if len(some) == 1:
        return _at(x, axis, some[0]).contiguous()
    return torch.cat([_at(x, axis, s) for s in some or (slice(0, 0),)], axis)


def _at(x: Tensor, axis: int, some: slice) -> Tensor:
    index: Any = (*[slice(None)] * axis, some)
    return x[index]


def with_rows(x: Tensor, axis: int, n: int, heads: int | None = None, dtype: torch.dtype | None = None) -> Shape:
    """The shape and dtype of a tensor like x with other rows and heads."""
    shape = list(x.shape)
    shape[axis] = n
    if heads is not None:
        shape[1] = heads
    return tuple(shape), x.dtype if dtype is None else dtype


def place(target: Tensor, axis: int, source: Tensor, moves: Sequence[tuple[slice, slice]], add: bool = False) -> None:
    """Copy, or add, rows of one tensor to rows of another."""
    for a, b in moves:
        into, x = _at(target, axis, b), _at(source, axis, a)
        if add:
            into.add_(x)
        else:
            into.copy_(x)


def in_order(moves: Sequence[tuple[slice, slice]]) -> list[tuple[slice, slice]]:
    """Moves in the order of their sources."""
    return sorted(moves, key=lambda x: x[0].start)
