"""Check gradients along a direction against finite differences of the oracle's forward pass."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from flashtile.backends import reference
from flashtile.numerics.dtypes import narrow, widen
from tests.support.grid import EPS, GRADIENTS, Call, standard_attention
from tests.support.runners import Runner

STEP = 1e-3  # of the differences
SLOPE = 1e-8  # bound of their relative error
CONSTANT = 16  # units of the accumulator: rounding constants such as the scale causes the same error everywhere


def agree(call: Call, runner: Runner) -> None:
    """Check <gradient, direction> of each input against the slope of the loss <out, dout> + <lse, dlse>.

    The magnitudes of a direction are random, and its signs are those of the oracle's gradient, or where that is 0, of
    the gradient found. So systematic errors add up and rounding does not: with n numbers, 1 % too much is about sqrt(n)
    times as visible as with random signs. The check is valid for any direction, so the choice of signs does no harm.
    """
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(call.q).tobytes()))
    grads = runner.backward(call, *runner.forward(call))
    exact, rounded = (standard_attention(call, precision) for precision in ("float64", call.problem().dtype))
    for name in GRADIENTS:
        if (given := getattr(grads, name)) is None:
            continue
        found = widen(given, np.float64)
        right = exact[name].reshape(found.shape)
        rounding = widen(narrow(rounded[name], call.problem().dtype), np.float64).reshape(found.shape) - right
        along = np.abs(rng.standard_normal(found.shape)) * np.where(np.where(right == 0, found, right) < 0, -1, 1)
        slope = slope_of(call, name[1:], along)
        bound = tolerance(call, right, along, rounding)
        with np.errstate(invalid="ignore"):  # Inf less Inf is NaN, which no bound allows
            error = abs(float((found * along).sum()) - slope)
        assert error <= bound, f"{name}: {error:.3g} from the slope {slope:.6g}; tolerance: {bound:.3g}"


def tolerance(call: Call, right: Any, along: Any, rounding: Any) -> float:
    """The allowed error of a slope. right: the oracle's gradient, not the one found, which might be Inf.

    rounding: the errors of standard attention in the same dtype. Along such directions the root mean square of their
    sum is at most `usual`. A gradient's errors may be 3 times as large, as everywhere, and one sum in 400 exceeds
    3 times its root mean square.
    """
    usual = float(np.hypot((rounding * np.sign(along)).sum(), np.linalg.norm(rounding)))
    problem = call.problem()
    constant = (SLOPE + CONSTANT * EPS[problem.accumulator]) * max(1.0, float(np.abs(right * along).sum()))
    few = 3 * EPS[problem.dtype] * float(np.linalg.norm(right)) if right.size <= 64 else 0.0  # see grid.tolerance()
    return 9 * usual + constant + few


def slope_of(call: Call, name: str, along: Any) -> float:
    """The slope of the loss along a direction of one input: central differences of order 4."""
    call = in_double(call)

    def at(t: float) -> float:
        return loss(_moved(call, name, t * along))

    return (8 * (at(STEP) - at(-STEP)) - (at(2 * STEP) - at(-2 * STEP))) / (12 * STEP)


def loss(call: Call) -> float:
    problem = call.problem()
    out, lse = (problem.in_caller_layout(x) for x in reference.forward(problem))
    return float((out * call.dout).sum() + np.where(np.isneginf(lse), 0, lse * call.dlse).sum())


def in_double(call: Call) -> Call:
    """Convert a call to float64, except integers and masks."""

    def double(x: Any) -> Any:
        whole = not isinstance(x, np.ndarray) or x.dtype == bool or np.issubdtype(x.dtype, np.signedinteger)
        return x if whole else widen(x, np.float64)

    options = {name: double(x) for name, x in call.options.items() if name != "out_dtype"}
    q, k, v, dout, dlse = map(double, (call.q, call.k, call.v, call.dout, call.dlse))
    return replace(call, q=q, k=k, v=v, dout=dout, dlse=dlse, options=options)


def _moved(call: Call, name: str, by: Any) -> Call:
    if name in ("bias", "sink"):
        return replace(call, options=call.options | {name: call.options[name] + by})
    return replace(call, **{name: getattr(call, name) + by})
