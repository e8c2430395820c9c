"""Huge pages for large results, as NumPy requests them; torch does not, and every small page costs a fault."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

LARGE = 1 << 22  # the least number of bytes for which NumPy requests them


def make_large(address: int, size: int) -> None:
    """Request huge pages for unused memory of at least LARGE bytes. The system may ignore it."""
    if (advise := _advise()) is not None:
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        advise(begin, address + size - begin, mmap.MADV_HUGEPAGE)


@cache
def _advise() -> Any:
    """Return madvise(); None if this is not Linux."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise: Any = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
