"""merge() of arrays by the C++ core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashtile.backends.native import library
from flashtile.backends.native.runner import DTYPES, fail
from flashtile.host.address import address
from flashtile.numerics.dtypes import Array, name_of


def merge(results: Sequence[Array], into: tuple[Array, Array], threads: int) -> None:
    """Merge results, given as out, lse, out, lse, ..., into arrays that may be among them."""
    arrays = [x if _is_readable(x) else np.array(x, order="C") for x in results] + [*into]
    strides = [[n // x.itemsize for n in x.strides[: into[1].ndim]] for x in arrays]
    numbers = (into[0].shape, [address(x) for x in arrays], [DTYPES[name_of(x.dtype)] for x in arrays], strides)
    words = [np.array(x, np.int64) for x in numbers]
    if status := library.load().ft_merge(threads, len(results) // 2, into[1].ndim, *map(address, words)):
        fail(status)


def can_write(x: Array) -> bool:
    """Whether the core can write to x: aligned numbers, a whole number of them apart."""
    return x.flags.aligned and not any(n % x.itemsize for n in x.strides)


def _is_readable(x: Array) -> bool:
    """Whether the core can read x in place; an lse may have any last axis, but a copy of it costs little."""
    return can_write(x) and (x.ndim == 0 or x.shape[-1] <= 1 or x.strides[-1] == x.itemsize)
