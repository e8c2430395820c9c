"""Arrays: the array functions that a runner needs, for NumPy or for tensors on a CPU."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from flashtile.host import threads
from flashtile.host.address import address
from flashtile.host.memory_order import Order
from flashtile.numerics.dtypes import BFLOAT16, accumulator, carrier, name_of, narrow, widen


class Arrays(NamedTuple):
    """Functions on NumPy arrays, or on tensors on a CPU."""

    address: Callable[[Any], int]
    strides: Callable[[Any], tuple[int, ...]]  # in bytes, or in elements
    contiguous: Callable[[Any], Any]  # an aligned contiguous copy, or the array itself
    # Returns what makes dense arrays of a shape and dtype; with q's dtype, one of several for bfloat16; with an order,
    # their axes lie in memory in that order.
    maker: Callable[..., Callable[[], Any]]
    clear: Callable[[Any], Any]  # sets all elements to 0
    add: Callable[[Any, Any], Any]  # adds a NumPy array to an array of this library, and returns that
    to_numpy: Callable[[Any], Any]  # the same memory
    from_numpy: Callable[..., Any]  # with an order: dense, with its axes in that order
    seed_value: Callable[[Any], int]  # of a seed that is an array
    threads: Callable[[], int]  # the default number of threads


def add(x: Any, y: Any) -> Any:
    """Add y to x, rounded once."""
    real = np.promote_types(accumulator(name_of(x.dtype)), y.dtype)
    total = narrow(widen(x, real) + y, name_of(x.dtype))
    x[...] = total.view(x.dtype) if total.dtype == BFLOAT16 else total
    return x


def _maker(shape: tuple[int, ...], name: str, q_dtype: Any, order: Order | None = None) -> Callable[[], Any]:
    dtype = q_dtype if name_of(q_dtype) == name else carrier(name)
    if order is None:
        return partial(np.empty, shape, dtype)
    in_memory, axes = tuple(shape[axis] for axis in order), tuple(order.index(axis) for axis in range(len(order)))
    return lambda: np.empty(in_memory, dtype).transpose(axes)


def _ordered(x: Any, order: Order | None = None) -> Any:
    if order is None:
        return x
    result = _maker(x.shape, name_of(x.dtype), x.dtype, order)()
    result[...] = x
    return result


def _contiguous(x: Any) -> Any:
    return x if x.flags.c_contiguous and not address(x) % x.itemsize else np.array(x, order="C")


NUMPY = Arrays(
    address=address,
    strides=attrgetter("strides"),
    contiguous=_contiguous,
    maker=_maker,
    clear=lambda x: x.fill(0),
    add=add,
    to_numpy=lambda x: x,
    from_numpy=_ordered,
    seed_value=int,
    threads=threads.default,
)
