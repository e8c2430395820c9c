"""Operands: the operator's arguments in the order of its schema, converted from and to options."""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flashtile.band import FAR, Band
from flashtile.checks.numbers import TEXT
from flashtile.checks.options import combine_bands
from flashtile.options import ARRAYS, NUMBERS, OPTIONS
from flashtile.origin import Origin
from flashtile.pytorch.interception import check_storage, readable

TENSOR_ARGUMENTS = ("q", "k", "v", *ARRAYS, "seed_tensor")
FIELDS = (*TENSOR_ARGUMENTS, *NUMBERS, "backend")
SCHEMA = ", ".join(
    [
        *("Tensor q", "Tensor k", "Tensor v"),
        *(f"{OPTIONS[name].schema} {name}" for name in ARRAYS),
        "Tensor? seed_tensor",
        *(f"{OPTIONS[name].schema} {name}" for name in NUMBERS),
        "str backend",
    ]
)
_MAY_BE_TENSORS = frozenset((*ARRAYS, "seed"))
_INTEGER_OPTIONS = [name for name in NUMBERS if "int" in OPTIONS[name].schema.lower()]  # or tuples of integers
_ONE_ELEMENT = (torch.Size(()), torch.Size((1,)))
if TYPE_CHECKING:
    _Fields = Any
else:
    _Fields = namedtuple("_Fields", FIELDS)


class Operands(_Fields):  # type: ignore[misc]
    """One call in the order of SCHEMA; or a fact about each of its arguments, such as whether it needs a gradient.

    A window, a Band and an Origin are lists of integers: FAR for no limit, 0 for as many heads as q has. seed is a
    signed 64-bit number, because a schema has no unsigned integers; a seed_tensor replaces it.
    """

    __slots__ = ()

    def options(self) -> dict[str, Any]:
        """The options for describe(): only those that differ from their defaults."""
        found: dict[str, Any] = {}
        for name, option in OPTIONS.items():
            x = getattr(self, name)
            if name == "seed":
                x = x % 2**64 if self.seed_tensor is None else resolve_seed(self.seed_tensor)
            elif x is not None and name == "window":
                x = tuple(None if n == FAR else n for n in x)
            elif x is not None and name == "band":
                x = Band(*x)
            elif x is not None and name == "origin":
                x = replace(Origin(*x), heads=x[4] or None)
            if option.array or isinstance(x, Tensor):
                if x is not None:
                    found[name] = x
            elif x != option.default:
                found[name] = x
        return found


def operands(q: Any, k: Any, v: Any, backend: str, options: Mapping[str, Any]) -> Operands:
    """Return the operands of a call with its numbers checked, as Python numbers; describe() checks the tensors."""
    found: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        x = options.get(name, option.default)
        if option.array:
            found[name] = x
        elif name == "seed":
            found["seed_tensor"] = x if isinstance(x, Tensor) else None
            x = 0 if isinstance(x, Tensor) else _to_python(x)
            found[name] = x if _is_unbacked(x) else _signed(option.check(name, x, None))
        else:
            found[name] = option.check(name, _to_python(x, option.schema.startswith("float")), None)
    window, band = found["window"], found["band"]
    combine_bands(found["causal"], window, band)
    if window is not None:
        found["window"] = [FAR if n is None else n for n in window]
    if band is not None:
        found["band"] = [band.left, band.right, band.offset]
    if (origin := found["origin"]) is not None:
        found["origin"] = [n or 0 for n in origin.numbers()]
    return Operands(q=q, k=k, v=v, backend=str(backend), **found)


def constants(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without tensors and seed, as values that a change of the caller's objects cannot affect."""
    found = {name: x for name, x in options.items() if name not in _MAY_BE_TENSORS}
    for name in _INTEGER_OPTIONS:
        if name in found:
            found[name] = _snapshot(found[name])
    return found


def named_tensors(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"q": q, "k": k, "v": v, **{name: options[name] for name in tensor_names(options)}}


def tensor_names(options: Mapping[str, Any]) -> list[str]:
    """The names of the options that are tensors."""
    return [name for name, x in options.items() if name in _MAY_BE_TENSORS and isinstance(x, Tensor)]


def seed_value(seed: Tensor) -> int:
    """Read a seed from a tensor, as an unsigned number."""
    check_storage({"seed": seed})
    return int(seed.item()) % 2**64


def resolve_seed(x: Any) -> Any:
    """Read the seed from a tensor if that costs the host nothing; return anything else, valid or not, unchanged."""
    if isinstance(x, Tensor):
        return seed_value(x) if readable(x) and x.dtype is torch.int64 and x.shape in _ONE_ELEMENT else x
    return _snapshot(x)


def _snapshot(x: Any) -> Any:
    """Convert an option to Python numbers, because an array, for one, may change before the backward pass.

    Return invalid values unchanged: describe() rejects them.
    """
    if x is None or isinstance(x, (int, *TEXT)):
        return x
    if isinstance(x, Band):
        return Band(*map(_snapshot, (x.left, x.right, x.offset)))
    if isinstance(x, Origin):
        return Origin(*map(_snapshot, x.numbers()))
    if isinstance(x, Sequence):
        return tuple(map(_snapshot, x))
    try:
        return operator.index(x)
    except TypeError:
        return x


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _is_unbacked(seed: Any) -> bool:
    """Whether a number is an unbacked symbol of the traced graph: its value is unknown, even its sign."""
    if not torch.compiler.is_compiling() or isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    unbacked: bool = guard_or_false(seed < 0) != guard_or_true(seed < 0)
    return unbacked


def _to_python(x: Any, real: bool = False) -> Any:
    """Convert a NumPy number to a Python number: torch.compile sees an array, and cannot trace its int()."""
    if isinstance(x, np.ndarray):
        return float(x) if real and x.ndim == 0 else x.tolist()
    if isinstance(x, (tuple, list)):  # torch.compile cannot trace tuple | list before torch 2.10
        return tuple(y.tolist() if isinstance(y, np.ndarray) else y for y in x)
    return x
