"""The cache of NumPy calls: what runs a call, by the layouts and dtypes of its arrays and by its options.

pytorch/calls.py is the same for tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashtile.band import Band
from flashtile.inputs import NO_ARRAYS, Inputs, inputs
from flashtile.options import ARRAYS

MOST = 2048  # calls in the cache
DTYPES = {np.dtype(name) for name in ("float16", "float32", "float64")}
FIXED = (int, float, str, np.generic, np.dtype, type)  # classes of options that never change
KNOWN: dict[Any, Any] = {}  # from a key to a runner
_ARRAYS = frozenset(ARRAYS)


def key_of(q: Any, k: Any, v: Any, backend: str, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that decides what runs; None for a call that is not cached. The arguments may be anything."""
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
        elif x.__class__ is bool or x.__class__ is float:  # as most are
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
    """An option as part of a key; None if it may have another value by the next call.

    1 equals True and 1.0, but describe() tells them apart: hence the classes.
    """
    kind = x.__class__
    if isinstance(x, FIXED):
        return name, x, kind
    if kind is Band:
        x = (x.left, x.right, x.offset)
    elif kind is not tuple:
        return None
    if not all(end is None or isinstance(end, FIXED) for end in x):
        return None
    return name, *x, kind, *map(type, x)


def inputs_of(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Inputs:
    """The inputs of a call, as the caller gave them."""
    if not options:
        return inputs((q, k, v, *NO_ARRAYS, 0))
    return inputs((q, k, v, *map(options.get, ARRAYS), options.get("seed", 0)))


def store(key: Any, runner: Any) -> None:
    """Store a runner, if it runs other calls as well."""
    if key is not None and runner.reusable:
        if len(KNOWN) >= MOST:
            KNOWN.clear()
        KNOWN[key] = runner
