"""Every backend's gradients against finite differences; and errors that this check detects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.numerics.dtypes import name_of, narrow, widen
from tests.support import finite_differences
from tests.support.grid import COMBINATIONS, GRADIENTS, OPTIONS, Call, Case, Size, build
from tests.support.runners import Runner, api_runner, every_runner

SIZE = Size(2, 4, 2, 97, 131, 33, 17)
PACKED = Size.packed(4, 2, 33, 17, (65, 97), (0, 3), (33, 0), (97, 40))
EVERY = (*((name,) for name in OPTIONS), *COMBINATIONS)
DTYPES = ("float64", "float32", "bfloat16", "float16")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_runner
@each_dtype
def test_gradients_are_slopes(runner: Runner, dtype: str) -> None:
    """Each option is checked in one of the four dtypes, in rotation."""
    for case in [
        *(Case(SIZE, dtype, x) for x in EVERY[DTYPES.index(dtype) :: 4]),
        Case(PACKED, dtype, ("everything",)),
    ]:
        finite_differences.agree(build(case), runner)


def changed(name: str, change: Callable[[Any], Any]) -> Runner:
    """The NumPy tiles backend with one gradient changed."""
    right = api_runner("tiles")

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        grads = right.backward(call, out, lse)
        x = getattr(grads, name)
        wrong = None if x is None else narrow(change(widen(x, np.float64)), name_of(x.dtype))
        return grads._replace(**{name: wrong})

    return Runner(f"tiles, {name} changed", right.forward, backward)


def detected(call: Call, name: str, change: Callable[[Any], Any]) -> bool:
    try:
        finite_differences.agree(call, changed(name, change))
    except AssertionError as error:
        return str(error).startswith(f"{name}: ")
    return False


@each_dtype
def test_one_per_cent_is_detected(dtype: str) -> None:
    """For each gradient; a sink's has few numbers, so it is tested only if the output has more than three digits."""
    call = build(Case(SIZE, dtype, ("causal", "bias", "sink", "softcap")))
    for name in GRADIENTS[: 5 if dtype in ("float64", "float32") else 4]:
        for by in (1.01, 0.99):
            assert detected(call, name, lambda x, by=by: x * by), f"{name} * {by}"


@each_dtype
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_rows_that_are_missing_are_detected(name: str, dtype: str) -> None:
    """A tenth of one head's rows is set to 0."""

    def without(x: Any) -> Any:
        x = x.copy()
        x[0, 0, -x.shape[2] // 10 :] = 0
        return x

    assert detected(build(Case(SIZE, dtype, ("sink",))), name, without)


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dsink"])
@pytest.mark.parametrize("by", [-1, np.nan, np.inf])
def test_nan_inf_and_another_sign_are_detected(name: str, by: float) -> None:
    assert detected(build(Case(SIZE, "bfloat16", ("sink",))), name, lambda x: x * by)


def test_a_gradient_of_the_lse_that_is_left_out_is_detected() -> None:
    right = api_runner("tiles")
    call = build(Case(SIZE, "bfloat16"))
    without_dlse = ft.attention_backward(call.dout, call.q, call.k, call.v, *right.forward(call), backend="tiles")
    with pytest.raises(AssertionError, match=r"^dq: "):
        finite_differences.agree(call, Runner("without dlse", right.forward, lambda *_: without_dlse))
