"""Errors of the functions that stand in for other libraries': flashtile's, and also RuntimeErrors, as theirs are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from torch import Tensor

from flashtile import errors
from flashtile.checks import arguments

P = ParamSpec("P")
R = TypeVar("R")


class ShapeError(errors.ShapeError, RuntimeError):
    """A shape, a length or a value does not fit."""


class DTypeError(errors.DTypeError, RuntimeError):
    """An argument is of the wrong type, dtype or library."""


def as_runtime_error(error: errors.FlashtileError, names: Mapping[str, str]) -> Exception:
    """Convert an error to a RuntimeError, and rename its argument. (UnsupportedError already is a RuntimeError.)"""
    kind: type[Exception] = type(error)
    for base, runtime in ((errors.ShapeError, ShapeError), (errors.DTypeError, DTypeError)):
        if isinstance(error, base):
            kind = runtime
    name, colon, rest = str(error).partition(": ")
    return kind(f"{names.get(name, name)}{colon}{rest}").with_traceback(error.__traceback__)


def raise_runtime_errors(function: Callable[P, R], names: Mapping[str, str] = MappingProxyType({})) -> Callable[P, R]:
    """Decorate a function to raise RuntimeErrors, with arguments renamed."""

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
    """Check that arguments annotated as Tensor are tensors. This is slow, so it runs only after a call has failed."""
    signature = inspect.signature(function)
    for name, x in signature.bind(*args, **kwargs).arguments.items():
        wanted = str(signature.parameters[name].annotation).partition(" | ")
        if wanted[0] == "Tensor" and not isinstance(x, Tensor) and (x is not None or not wanted[1]):
            raise DTypeError(f"{name}: expected a torch tensor, got {type(x).__name__}") from None


def check_stored_values(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
    """Check that a call's tensors store their values in plain memory; also run only after a call has failed."""
    try:
        arguments.check_tensors(**inspect.signature(function).bind(*args, **kwargs).arguments)
    except errors.FlashtileError as error:
        raise as_runtime_error(error, {}) from None
