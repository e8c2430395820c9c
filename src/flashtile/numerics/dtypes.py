"""Element types by name, and their conversion in NumPy."""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")
EIGHT_BITS = "float8_e4m3fn"  # torch tensors only
ITEMSIZE = {EIGHT_BITS: 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# For np.errstate: Inf, NaN and 0 propagate silently, whatever the caller's settings.
QUIET: Any = dict.fromkeys(("divide", "over", "under", "invalid"), "ignore")

# NumPy has no bfloat16. Its bits are carried by this one-field record, so that they cannot be mistaken for integers;
# arrays of the ml_dtypes package, whose dtype is named bfloat16, are accepted too.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
_FLOAT8 = np.dtype([(EIGHT_BITS, np.uint8)])  # for plan(), which needs shapes only


@cache
def name_of(dtype: Any) -> str:
    """The name of a dtype: 'float32' for np.float32, torch.float32, ...; 'bfloat16' for any of its carriers.

    Non-native byte order is another type, '>f4', which no function takes.
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
    """The dtype of sums and statistics: float32, or float64 for float64 inputs."""
    return "float64" if name == "float64" else "float32"


def wider(a: str, b: str) -> str:
    """Return the one of two dtypes that has more bits."""
    return max(a, b, key=ITEMSIZE.__getitem__)


def fallback_dtype(device: str) -> str:
    """The dtype that 8-bit tensors are converted to for backends without 8-bit products."""
    return "float32" if device == "cpu" else "bfloat16"


def carrier(name: str) -> np.dtype[Any]:
    """The NumPy dtype that holds elements of this name."""
    return {"bfloat16": BFLOAT16, EIGHT_BITS: _FLOAT8}.get(name) or np.dtype(name)


def widen(x: Array, to: Any = np.float32) -> Array:
    """Convert x to a dtype NumPy can compute with; no copy if it already has it."""
    if x.dtype == BFLOAT16 or x.dtype.name == "bfloat16":
        bits = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(x.shape).astype(to, copy=False)
    return x.astype(to, copy=False)


@np.errstate(**QUIET)
def narrow(x: Array, name: str) -> Array:
    """Round x (to nearest, ties to even) to the named type, in its carrier."""
    if name_of(x.dtype) == name:
        return x
    if name != "bfloat16":
        return x.astype(name, copy=False)
    wide = np.ascontiguousarray(x, dtype=np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(wide)] = 0x7FC0
    return rounded.view(BFLOAT16).reshape(x.shape)
