"""How far an attention kernel's result is from the float64 oracle, and how far it may be."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashtile.backends import reference
from flashtile.numerics.dtypes import Array
from flashtile.problem import describe

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def judge(out: Array, q: Array, k: Array, v: Array, *, causal: bool, dtype: str = "float32") -> dict[str, Any]:
    """The largest error of [heads, n, d], beside twice that of standard attention in the same dtype and one rounding.

    q, k and v are float32, and so may `out` be, whatever the dtype they came from.
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


def row(check: dict[str, Any]) -> tuple[str, ...]:
    """A verdict as a line of a table headed ROW."""
    mask = "causal" if check["causal"] else "none"
    return check["dtype"], str(check["n"]), mask, f"{check['error']:.1e}", f"{check['allowed']:.1e}"
