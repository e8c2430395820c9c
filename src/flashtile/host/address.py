"""The address of an array's data: as ndarray.ctypes.data in a tenth of the time, which shows in small calls."""

import ctypes
import sys
from collections.abc import Callable

import numpy as np

from flashtile.numerics.dtypes import Array

_pointer = ctypes.c_void_p.from_address
_HEADER = object.__basicsize__


def _data_field(x: Array) -> int:
    """Read the address from the object: NumPy's C API puts it right after the header."""
    return _pointer(id(x) + _HEADER).value or 0


def _by_ctypes(x: Array) -> int:
    return x.ctypes.data


def _choose() -> Callable[[Array], int]:
    """Choose the fast function if it agrees with the public one; id() is an address in CPython only."""
    probe = np.zeros(2)
    same = sys.implementation.name == "cpython" and all(_data_field(x) == _by_ctypes(x) for x in (probe, probe[1:]))
    return _data_field if same else _by_ctypes


address = _choose()
