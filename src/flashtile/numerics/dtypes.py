"""The element types, by name, and how NumPy code widens and rounds them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")
EIGHT_BITS = "float8_e4m3fn"  # of tensors only
ITEMSIZE = {EIGHT_BITS: 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# For np.errstate: Inf, NaN and 0 go where the formulas send them, whatever the caller wants NumPy to say to that.
QUIET: Any = dict.fromkeys(("divide", "over", "under", "invalid"), "ignore")

# NumPy has no bfloat16 of its own. Its bits travel as this one-field record, so that they cannot be taken for
# integers; arrays of the ml_dtypes package, whose dtype is named bfloat16, are welcome too.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
_FLOAT8 = np.dtype([(EIGHT_BITS, np.uint8)])  # for plan(), which looks at shapes only


@cache
def name_of(dtype: Any) -> str:
    """'float32' for np.float32, torch.float32 and their like; 'bfloat16' for any of its carriers.

    Bytes in the order of another machine are another type, '>f4', which nobody takes.
    """
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, np.dtype):
        if not dtype.isnative:
            return str(dtype.str)
        return dtype.names[0] if dtype in (BFLOAT16, _FLOAT8) and dtype.names else str(dtype.name)
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        return str(np.dtype(dtype).name)
    return str(dtype).removeprefix("torch.")


def accumulator(name: str) -> str:
    """Sums and statistics are float32, or float64 for float64 inputs."""
    return "float64" if name == "float64" else "float32"


def fallback_dtype(device: str) -> str:
    """What backends on this device are given that do not multiply 8-bit tensors as they are."""
    return "float32" if device == "cpu" else "bfloat16"


def carrier(name: str) -> np.dtype[Any]:
    """The NumPy dtype that holds elements of this name."""
    return {"bfloat16": BFLOAT16, EIGHT_BITS: _FLOAT8}.get(name) or np.dtype(name)


def widen(x: Array, to: Any = np.float32) -> Array:
    """x as an array NumPy can calculate with; no copy where x already is one."""
    if x.dtype == BFLOAT16 or x.dtype.name == "bfloat16":
        bits = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(x.shape).astype(to, copy=False)
    return x.astype(to, copy=False)


@np.errstate(**QUIET)
def narrow(x: Array, name: str) -> Array:
    """x rounded (to nearest, ties to even) to the named type, in its carrier."""
    if name_of(x.dtype) == name:
        return x
    if name != "bfloat16":
        return x.astype(name, copy=False)
    wide = np.ascontiguousarray(x, dtype=np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(wide)] = 0x7FC0
    return rounded.view(BFLOAT16).reshape(x.shape)
