"""Gradients for scores so large that the lse, one number, loses the logarithm of the sum; large values."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import flashtile as ft
from flashtile.backends import reference
from flashtile.numerics.softmax import COARSE
from flashtile.problem import describe
from tests.support.grid import Call, Case, Size, Truth, build, check_backward, check_forward, truth_of
from tests.support.large_scores import large_scores
from tests.support.runners import Runner, every_runner
from tests.tools.tree import ROOT

SIZES = {
    "blocks": Size(1, 4, 2, 150, 170, 16, 24),
    "decode": Size(2, 4, 2, 1, 300, 32, 32),
    "few": Size(1, 8, 2, 3, 90, 16, 16),
    "packed": Size.packed(2, 1, 8, 8, (70, 9), (0, 0), (33, 120)),
    "split": Size(1, 1, 1, 20, 2100, 16, 16),
}
OPTIONS = (
    (150.0, (), "float32"),
    (2.0**17, ("causal",), "float32"),
    (2.0**99, ("causal",), "float64"),
    (-(2.0**33), ("window", "bias"), "bfloat16"),
    (2.0**33, ("mask", "dropout", "sink"), "float32"),
    (2.0**99, ("kv_lengths", "causal"), "bfloat16"),
    (1000.0, ("bias of keys",), "float32"),
)
each_size = pytest.mark.parametrize("size", SIZES)


def agree(call: Call, against: Truth, runner: Runner) -> None:
    out, lse = runner.forward(call)
    check_forward(call, against, out, lse)
    check_backward(call, against, runner.backward(call, out, lse))


@cache
def large(case: tuple[float, tuple[str, ...], str], size: str) -> tuple[Call, Truth]:
    call = large_scores(*case, SIZES[size])
    return call, truth_of(call)


@every_runner
@each_size
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_gradients(case: tuple[float, tuple[str, ...], str], size: str, runner: Runner) -> None:
    agree(*large(case, size), runner)


@cache
def with_bias(size: str, fill: float, *more: str) -> Call:
    """Give some rows one bias for all their keys, as numeric masks do for padding."""
    call = build(Case(SIZES[size], "float32", ("bias", *more)))
    bias = np.zeros_like(call.options["bias"])
    bias[..., ::2, :] = fill
    k = np.round(call.k * 4) * np.float32(0 if abs(fill) > 1e6 else 0.25)  # scores that the bias leaves as they are
    return replace(call, q=np.round(call.q), k=k, options=call.options | {"bias": bias, "scale": 1.0})


@cache
def with_sinks(size: str, fill: float) -> tuple[Call, Truth]:
    """Add sinks as large as the bias, so that sink and keys share the weight of a row."""
    call = with_bias(size, fill, "sink")
    call = replace(call, options=call.options | {"sink": np.full_like(call.options["sink"], fill)})
    return call, truth_of(call)


@cache
def truth_of_bias(size: str, fill: float) -> Truth:
    return truth_of(with_bias(size, fill))


@every_runner
@pytest.mark.parametrize("size", ["blocks", "decode", "few", "split"])
@pytest.mark.parametrize("fill", [float(np.finfo(np.float32).min), -1e9, -3e3, 100.0])
def test_rows_hidden_by_a_bias(fill: float, size: str, runner: Runner) -> None:
    agree(with_bias(size, fill), truth_of_bias(size, fill), runner)


@every_runner
@pytest.mark.parametrize("size", ["blocks", "few"])
@pytest.mark.parametrize("fill", [float(np.finfo(np.float32).min), -3e3])
def test_gradients_through_the_lse_and_of_sinks(fill: float, size: str, runner: Runner) -> None:
    agree(*with_sinks(size, fill), runner)


@every_runner
def test_rows_without_an_incoming_gradient(runner: Runner) -> None:
    """Such as padding: their gradients are 0, and their sums need not be recomputed."""
    call = with_bias("blocks", -1e9)
    dout, dlse = call.dout.copy(), call.dlse.copy()
    dout[..., ::2, :], dlse[..., ::2] = 0, 0
    call = replace(call, dout=dout, dlse=dlse)
    out, lse = runner.forward(call)
    grads = runner.backward(call, out, lse)
    check_backward(call, truth_of(call), grads)
    assert not grads.dq[..., ::2, :].any()


def test_the_core_has_the_same_limit() -> None:
    text = (ROOT / "src/flashtile/backends/native/core/lse.h").read_text()
    assert f"COARSE = R({COARSE:g})" in text


def test_the_error_of_large_scores_over_many_calls() -> None:
    """At a scale of 1000 one near tie decides the largest error of a call, and the order of the sum q.k decides how
    large it is. So one call says little; over many, the core is as accurate as standard attention in another order.
    """
    core, reordered = [], []
    for seed in range(15):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal((1, 1, 300, 64)).astype(np.float32) for _ in range(3))
        order = rng.permutation(64)
        exact, *others = (
            reference.forward(describe(q[..., at], k[..., at], v, scale=1e3), precision)[0]
            for at, precision in ((slice(None), "float64"), (slice(None), "float32"), (order, "float32"))
        )
        usual, other = (np.abs(x - exact).max() for x in others)
        core.append(np.abs(ft.attention(q, k, v, scale=1e3) - exact).max() / usual)
        reordered.append(other / usual)
    by_chance = np.median(reordered)
    assert max(reordered) > 3, "the order of the sum matters"
    assert np.median(core) < 2 * max(by_chance, 1 / by_chance)


@every_runner
@each_size
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_near_the_largest_number(dtype: str, size: str, runner: Runner) -> None:
    """Their weighted mean is finite, although their sum is not; small values in other columns keep their bits."""
    call = build(Case(SIZES[size], dtype, ("causal",)))
    big = float(np.finfo(dtype).max) * 0.98
    v = call.v.copy()
    v[..., 1], v[..., 2] = big, -big
    v[..., 3] = np.where(np.arange(v[..., 3].size).reshape(v[..., 3].shape) % 2, big, -big)
    v[..., 4] = np.float32(1e-27)
    out, lse = runner.forward(replace(call, v=v))
    smaller = v.copy()
    smaller[..., 1:4] *= 2.0**-10
    expected, expected_lse = runner.forward(replace(call, v=smaller))
    expected[..., 1:4] *= 2.0**10
    assert np.isfinite(out).all()
    tolerance = 2e-6 if dtype == "float32" else 1e-13
    if runner.name == "sdpa" and dtype == "float32":
        tolerance = 4e-6  # for the exponentials of torch's kernel on processors with AVX-512
    columns = np.abs(expected).max(axis=tuple(range(expected.ndim - 1)))
    assert (np.abs(out / columns - expected / columns) < tolerance).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=tolerance)
