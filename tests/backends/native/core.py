"""The functions that the C++ core exports for tests, with Python types."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from flashtile.band import Band
from tests.support.runners import why_missing

WHY_MISSING = why_missing("native")
needs_native = pytest.mark.skipif(WHY_MISSING is not None, reason=f"native: {WHY_MISSING}")


def library() -> Any:
    from flashtile.backends.native import library as native

    return native.load()


def c_cuts(band: Band, first: int, last: int, n_cols: int, block: int) -> tuple[int, int, int, int]:
    found = (ctypes.c_int64 * 4)()
    numbers = (band.left, band.right, band.offset, first, last, n_cols, block)
    library().ft_cuts(*map(ctypes.c_int64, numbers), found)
    return tuple(found)


def c_keep(seed: int, head: int, i: int, j: int, n: int, dropout: float) -> Any:
    found = np.full(n, 7, np.uint8)
    library().ft_keep(
        ctypes.c_uint64(seed),
        *map(ctypes.c_int64, (head, i, j, n)),
        ctypes.c_double(dropout),
        found.ctypes.data_as(ctypes.c_void_p),
    )
    assert set(found.tolist()) <= {0, 1}
    return found.astype(bool)


def c_span_cuts(
    band: Band, first: int, last: int, n_cols: int, block: int, limits: Any
) -> tuple[tuple[int, int, int, int], ...]:
    """Limits of rows first..last-1: (rows, spans, 2)."""
    limits = np.ascontiguousarray(limits, np.int32)
    count = limits.shape[1]
    found = (ctypes.c_int64 * (4 * count))()
    numbers = (band.left, band.right, band.offset, first, last, n_cols, block)
    address = limits.ctypes.data_as(ctypes.c_void_p)
    library().ft_span_cuts(*map(ctypes.c_int64, numbers), address, ctypes.c_int64(count), found)
    return tuple(tuple(found[4 * r : 4 * r + 4]) for r in range(count))
