"""The cache of NumPy calls: what runs a call, by the layouts and dtypes of its arrays and by its options.

pytorch/calls.py is the same for tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashtile.band import Band
from flashtile.host.address import address
from flashtile.inputs import Inputs
from flashtile.options import ARRAYS

MOST = 2048  # calls in the cache
DTYPES = {np.dtype(name) for name in ("float16", "float32", "float64")}
FIXED = (int, float, str, np.generic, np.dtype, type)  # classes of options that never change
KNOWN: dict[Any, Any] = {}  # from a key to a runner
_ARRAYS = frozenset(ARRAYS)
_NONE = (None,) * len(ARRAYS)
_inputs: Any = tuple.__new__  # Inputs._make() takes twice as long


def key_of(q: Any, k: Any, v: Any, backend: str, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that decides what runs; None for a call that is not cached. The arguments may be anything."""
    dtype = getattr(q, "dtype", None)
    if backend.__class__ is not str or not (
        q.__class__ is k.__class__ is v.__class__ is np.ndarray and k.dtype is v.dtype is dtype in DTYPES
    ):
        return None
    if (address(q) | address(k) | address(v)) % dtype.itemsize:
        return None
    key = [backend, dtype, q.shape, q.strides, k.shape, k.strides, v.shape, v.strides]
    for name, x in options.items():
        if name == "seed":
            if x.__class__ is not int or not 0 <= x < 1 << 64:
                return None
        elif name in _ARRAYS:
            if x.__class__ is not np.ndarray or address(x) % x.itemsize or name in ("cu_q", "cu_k"):
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


def inputs(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Inputs:
    """The inputs of a call, as the caller gave them."""
    if not options:
        return _inputs(Inputs, (q, k, v, *_NONE, 0))  # type: ignore[no-any-return]
    given = options.get
    return _inputs(Inputs, (q, k, v, *map(given, ARRAYS), given("seed", 0)))  # type: ignore[no-any-return]


def remember(key: Any, runner: Any) -> None:
    """Store a runner, if it runs other calls as well."""
    if key is not None and runner.lasting:
        if len(KNOWN) >= MOST:
            KNOWN.clear()
        KNOWN[key] = runner
