"""Arrays: what a runner does with the arrays of a library, whose memory is all that a kernel sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from flashtile.host import threads
from flashtile.host.address import address
from flashtile.numerics.dtypes import carrier, name_of


class Arrays(NamedTuple):
    """Functions on the arrays of NumPy, or on tensors on the CPU."""

    address: Callable[[Any], int]
    strides: Callable[[Any], tuple[int, ...]]  # in bytes, or in elements
    contiguous: Callable[[Any], Any]  # a copy, aligned, unless it is so
    # Makes contiguous arrays of this shape and dtype. bfloat16 has several NumPy dtypes: the last argument is q's.
    maker: Callable[[tuple[int, ...], str, Any], Callable[[], Any]]
    clear: Callable[[Any], Any]  # sets all elements to 0
    to_numpy: Callable[[Any], Any]  # the same memory
    from_numpy: Callable[[Any], Any]
    number: Callable[[Any], int]  # the seed in an array
    threads: Callable[[], int]  # the number for a call, if neither it nor FLASHTILE_THREADS gives one


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
    number=int,
    threads=threads.default,
)
