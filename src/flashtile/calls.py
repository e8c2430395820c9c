"""Cache of prepared NumPy calls, keyed by the metadata of the arrays and by the options.

pytorch/calls.py is the cache for tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashtile.band import Band
from flashtile.inputs import NO_ARRAYS, Inputs, inputs
from flashtile.options import ARRAYS
from flashtile.origin import Origin

MAX_ENTRIES = 2048  # entries in the cache
DTYPES = {np.dtype(name) for name in ("float16", "float32", "float64")}
FIXED = (int, float, str, np.generic, np.dtype, type)  # immutable classes of options
KNOWN: dict[Any, Any] = {}  # runners by key
_ARRAYS = frozenset(ARRAYS)


def key_of(q: Any, k: Any, v: Any, backend: str, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return all that decides which runner fits; None if the call cannot be cached. Arguments are unchecked."""
    dtype = getattr(q, "dtype", None)
    if backend.__class__ is not str or not (
        q.__class__ is k.__class__ is v.__class__ is np.ndarray and k.dtype is v.dtype is dtype in DTYPES
    ):
        return None
    if not (q.flags.aligned and k.flags.aligned and v.flags.aligned):
        return None
    key = [backend, dtype, q.shape, q.strides, k.shape, k.strides, v.shape, v.strides]
    for name, x in options.items():
        if name == "seed":
            if x.__class__ is not int or not 0 <= x < 1 << 64:
                return None
        elif x.__class__ is bool or x.__class__ is float:
            key += name, x, x.__class__
        elif name in _ARRAYS:
            if x.__class__ is not np.ndarray or not x.flags.aligned:
                return None
            key += name, x.shape, x.strides, x.dtype
        elif (part := part_of_key(name, x)) is None:
            return None
        else:
            key += part
    return tuple(key)


def part_of_key(name: str, x: Any) -> tuple[Any, ...] | None:
    """Return the key of an option; None if its value may change before the next call.

    1 equals True and 1.0, but describe() distinguishes them: hence the classes.
    """
    kind = x.__class__
    if isinstance(x, FIXED):
        return name, x, kind
    if kind is Band:
        x = (x.left, x.right, x.offset)
    elif kind is Origin:
        x = x.numbers()
    elif kind is not tuple:
        return None
    if not all(end is None or isinstance(end, FIXED) for end in x):
        return None
    return name, *x, kind, *map(type, x)


def inputs_of(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Inputs:
    """The Inputs of a call, in the caller's layout."""
    if not options:
        return inputs((q, k, v, *NO_ARRAYS, 0))
    return inputs((q, k, v, *map(options.get, ARRAYS), options.get("seed", 0)))


def store(key: Any, runner: Any) -> None:
    """Store a reusable runner."""
    if key is not None and runner.reusable:
        if len(KNOWN) >= MAX_ENTRIES:
            KNOWN.clear()
        KNOWN[key] = runner
