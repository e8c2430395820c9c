"""Arrays: the array functions that a runner needs, for NumPy or for tensors on a CPU."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from flashtile.host import threads
from flashtile.host.address import address
from flashtile.numerics.dtypes import carrier, name_of


class Arrays(NamedTuple):
    """Functions on NumPy arrays, or on tensors on a CPU."""

    address: Callable[[Any], int]
    strides: Callable[[Any], tuple[int, ...]]  # in bytes, or in elements
    contiguous: Callable[[Any], Any]  # an aligned contiguous copy, or the array itself
    # Returns what makes contiguous arrays of a shape and dtype; with q's dtype, one of several for bfloat16.
    maker: Callable[[tuple[int, ...], str, Any], Callable[[], Any]]
    clear: Callable[[Any], Any]  # sets all elements to 0
    to_numpy: Callable[[Any], Any]  # the same memory
    from_numpy: Callable[[Any], Any]
    seed_value: Callable[[Any], int]  # of a seed that is an array
    threads: Callable[[], int]  # the default number of threads


def _maker(shape: tuple[int, ...], name: str, q_dtype: Any) -> Callable[[], Any]:
    return partial(np.empty, shape, q_dtype if name_of(q_dtype) == name else carrier(name))


def _contiguous(x: Any) -> Any:
    return x if x.flags.c_contiguous and not address(x) % x.itemsize else np.array(x, order="C")


NUMPY = Arrays(
    address=address,
    strides=attrgetter("strides"),
    contiguous=_contiguous,
    maker=_maker,
    clear=lambda x: x.fill(0),
    to_numpy=lambda x: x,
    from_numpy=lambda x: x,
    seed_value=int,
    threads=threads.default,
)
