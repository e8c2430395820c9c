"""Checks of single numbers."""

import math
import numbers
import operator
import sys
from typing import Any

import numpy as np

from flashtile.errors import DTypeError, ShapeError

LARGEST = {"float32": float(np.finfo(np.float32).max), "float64": sys.float_info.max}
TEXT = (str, bytes, bytearray)  # sequences, but not of numbers


def check_flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise DTypeError(f"{name}: expected True or False, got {value!r}")


def check_real(name: str, value: Any, least: float | None = None) -> float:
    """Return a finite number of at least `least` as a Python float."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise DTypeError(f"{name}: expected a number, got {type(value).__name__}")
        most = LARGEST["float64"]
        if isinstance(value, numbers.Rational) and (value < -most or not value <= most):
            raise ShapeError(f"{name}: expected a finite number, got one too large for a float")
    number = float(value)
    if not -math.inf < number < math.inf:  # torch.compile cannot trace math.isfinite() of a symbol
        raise ShapeError(f"{name}: expected a finite number, got {value}")
    if least is not None and number < least:
        raise ShapeError(f"{name}: expected a number of at least {least}, got {value}")
    return number


def check_integer(name: str, value: Any, low: int | None, high: int | None) -> int:
    """Return an integer from low to high as a Python int; None is no limit."""
    if type(value).__name__ == "SymInt":  # traced: the operator checks its value when it runs
        return value  # type: ignore[no-any-return]
    number: int | None = value
    if type(value) is not int:  # a traced int has type int; index() would specialize it
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:  # a fraction, or an array of several numbers
            number = None
    if number is None:
        raise DTypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if (low is not None and number < low) or (high is not None and number > high):
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        got = value if abs(number) < 1 << 128 else "a number of very many digits"  # Python limits how many it prints
        raise ShapeError(f"{name}: expected an integer {wanted}, got {got}")
    return number
