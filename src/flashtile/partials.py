"""merge() of arrays: results over disjoint keys into one, by the C++ core, or in NumPy without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashtile.backends.native import library
from flashtile.host import threads
from flashtile.numerics.dtypes import Array, accumulator, name_of, narrow, widen
from flashtile.numerics.softmax import merge_normalized


def merge_arrays(results: Sequence[Array], into: tuple[Array, Array], n_threads: int | None = None) -> None:
    """Merge checked results, given as out, lse, out, lse, ..., into two arrays, which may be among them."""
    if library.why_not() is None:
        from flashtile.backends.native import merge

        if all(map(merge.can_write, into)):
            return merge.merge(results, into, threads.from_environment() or n_threads or threads.default())
    sums = np.result_type(*(accumulator(name_of(x.dtype)) for x in (*results, *into)))
    merged = merge_normalized(*(widen(x, sums) for x in results))
    for found, to in zip(merged, into, strict=True):
        to[...] = narrow(found, name_of(to.dtype)).view(to.dtype)


def empty_like(results: Sequence[Array]) -> tuple[Array, Array]:
    """Allocate what merge() returns: an out like the first one, and an lse without 16-bit sums."""
    kind = np.result_type(*(accumulator(name_of(lse.dtype)) for lse in results[1::2]))
    return np.empty(results[0].shape, results[0].dtype), np.empty(results[1].shape, kind)
