"""Errors at the doors of other libraries: flashtile's own, and RuntimeErrors as well, as theirs are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from torch import Tensor

from flashtile import errors
from flashtile.pytorch import subclasses

P = ParamSpec("P")
R = TypeVar("R")


class ShapeError(errors.ShapeError, RuntimeError):
    """A shape, a length or a value does not fit."""


class DTypeError(errors.DTypeError, RuntimeError):
    """An argument is of the wrong type, dtype or library."""


def as_runtime_error(error: errors.FlashtileError, names: Mapping[str, str]) -> Exception:
    """The same error as such a one, of arguments by these names. (An UnsupportedError is a RuntimeError by itself.)"""
    kind: type[Exception] = type(error)
    for base, runtime in ((errors.ShapeError, ShapeError), (errors.DTypeError, DTypeError)):
        if isinstance(error, base):
            kind = runtime
    name, colon, rest = str(error).partition(": ")
    return kind(f"{names.get(name, name)}{colon}{rest}").with_traceback(error.__traceback__)


def raise_runtime_errors(function: Callable[P, R], names: Mapping[str, str] = MappingProxyType({})) -> Callable[P, R]:
    """The function, with such errors."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except errors.FlashtileError as error:
            raise as_runtime_error(error, names) from None
        except (AttributeError, RuntimeError, TypeError, ValueError):
            check_tensors(function, *args, **kwargs)
            check_stored_values(function, *args, **kwargs)
            raise

    return wrapper


def check_tensors(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
    """That what a call gives for a Tensor is one. Asked for where the call went wrong, for asking takes long."""
    signature = inspect.signature(function)
    for name, x in signature.bind(*args, **kwargs).arguments.items():
        wanted = str(signature.parameters[name].annotation).partition(" | ")
        if wanted[0] == "Tensor" and not isinstance(x, Tensor) and (x is not None or not wanted[1]):
            raise DTypeError(f"{name}: expected a torch tensor, got {type(x).__name__}") from None


def check_stored_values(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
    """That the tensors of a call hold their values, and plainly; likewise."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    try:
        subclasses.check_plain(tensors)
        subclasses.check_whole(tensors)
    except errors.FlashtileError as error:
        raise as_runtime_error(error, {}) from None
