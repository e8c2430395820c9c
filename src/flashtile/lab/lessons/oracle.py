"""Compare an attention kernel's result with the float64 oracle: the error, and the error allowed."""

from typing import Any

import numpy as np

from flashtile.backends import reference
from flashtile.numerics.dtypes import Array
from flashtile.problem import describe

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def check(out: Array, q: Array, k: Array, v: Array, *, causal: bool, dtype: str = "float32") -> dict[str, Any]:
    """Check the largest error of [heads, n, d]: at most twice that of standard attention in the dtype, plus a rounding.

    q, k and v are float32, and `out` may be, whatever dtype they came from.
    """
    problem = describe(q, k, v, causal=causal)
    exact = reference.forward(problem)[0][0]
    standard = np.abs(reference.forward(problem, dtype)[0][0] - exact).max()
    error = np.abs(out - exact).max()
    allowed = 2 * standard + EPS[dtype] * np.abs(exact).max()
    return {
        "dtype": dtype,
        "n": q.shape[1],
        "causal": causal,
        "error": float(error),
        "allowed": float(allowed),
        "holds": bool(error <= allowed),
    }


ROW = ("dtype", "N", "mask", "largest error", "allowed")


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a check under the head ROW."""
    mask = "causal" if found["causal"] else "none"
    return found["dtype"], str(found["n"]), mask, f"{found['error']:.1e}", f"{found['allowed']:.1e}"
