"""Large pages for large results, as NumPy asks for them; torch does not, and then each small page costs a fault."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

LARGE = 1 << 22  # bytes from which on NumPy asks


def make_large(address: int, size: int) -> None:
    """Of fresh memory, at least LARGE of it. The system may do so or not."""
    if (advise := _advise()) is not None:
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        advise(begin, address + size - begin, mmap.MADV_HUGEPAGE)


@cache
def _advise() -> Any:
    """madvise(); None where there is none of Linux's kind."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise: Any = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
