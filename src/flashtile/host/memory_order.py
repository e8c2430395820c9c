"""The order of axes in memory: a result has that of the input that it belongs to, so that a model need not copy it.

Axes are those of rank 4, (sequence, head, row, column); columns are always contiguous.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

Order = tuple[int, ...]
MAX_ROW_STRIDE = 1 << 23  # elements: a GPU counts offsets within a tile, of 256 rows at most, in 32 bits


def order_of(
    shape: Sequence[Any], strides: Sequence[Any], packed: bool, less: Callable[..., bool] = operator.lt
) -> Order:
    """Return the axes but the last, outermost first. Repeated elements or rows far apart: as contiguous.

    strides: none is negative. packed: a contiguous array has rows before heads. less: compares symbols of a graph too;
    False if it is unknown.
    """
    contiguous = (0, 2, 1) if packed else (0, 1, 2)
    long = [axis for axis in contiguous if less(1, shape[axis])]
    if any(less(strides[axis], 1) for axis in long):  # elements are repeated
        return contiguous
    found: list[int] = []
    for axis in long:
        at = len(found)
        while at and less(strides[found[at - 1]], strides[axis]):
            at -= 1
        found.insert(at, axis)
    sorted_axes = iter(found)
    order = tuple(next(sorted_axes) if axis in long else axis for axis in contiguous)
    row_stride = shape[3]
    for axis in order[order.index(2) + 1 :]:
        row_stride = row_stride * shape[axis]
    return contiguous if less(MAX_ROW_STRIDE - 1, row_stride) else order


def strides_of(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense array of rank 4 with this order of axes."""
    strides, width = [1] * 4, max(shape[3], 1)
    for axis in reversed(order):
        strides[axis], width = width, width * max(shape[axis], 1)
    return tuple(strides)


def axes_of_caller(rank: int, packed: bool) -> tuple[int, ...]:
    """Return which axes of rank 4 the caller's arrays have, in their order."""
    return (2, 1, 3) if packed else (0, 1, 2, 3)[4 - rank :]


def of_caller(order: Order, rank: int, packed: bool) -> Order | None:
    """Return the order of the caller's axes; None if it is that of a contiguous array."""
    axes = axes_of_caller(rank, packed)
    found = tuple(axes.index(axis) for axis in (*order, 3) if axis in axes)
    return None if found == (*range(len(axes)),) else found
