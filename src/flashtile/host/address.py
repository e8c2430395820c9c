"""Where an array's elements lie: ndarray.ctypes.data, at a tenth of the time, which a small call would notice."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np

from flashtile.numerics.dtypes import Array

_pointer = ctypes.c_void_p.from_address
_HEADER = object.__basicsize__


def _data_field(x: Array) -> int:
    """NumPy's C API puts the address right behind the header of the object."""
    return _pointer(id(x) + _HEADER).value or 0


def _ctypes_address(x: Array) -> int:
    return x.ctypes.data


def _choose() -> Callable[[Array], int]:
    """The quick way where it agrees with the official one; only CPython's id() is an address to look at."""
    probe = np.zeros(2)
    quick = sys.implementation.name == "cpython" and all(
        _data_field(x) == _ctypes_address(x) for x in (probe, probe[1:])
    )
    return _data_field if quick else _ctypes_address


address = _choose()
