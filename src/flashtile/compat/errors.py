"""Errors at the doors of other libraries: flashtile's own, and RuntimeErrors as well, as theirs are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from flashtile import errors

P = ParamSpec("P")
R = TypeVar("R")


class ShapeError(errors.ShapeError, RuntimeError):
    """A shape, a length or a value does not fit."""


class DTypeError(errors.DTypeError, RuntimeError):
    """An argument is of the wrong type, dtype or library."""


def theirs(error: errors.FlashtileError) -> Exception:
    """The same error as such a one. (An UnsupportedError is a RuntimeError by itself.)"""
    for kind, both in ((errors.ShapeError, ShapeError), (errors.DTypeError, DTypeError)):
        if isinstance(error, kind):
            return both(*error.args).with_traceback(error.__traceback__)
    return error


def as_theirs(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with such errors."""

    @wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except errors.FlashtileError as error:
            raise theirs(error) from None

    return door
