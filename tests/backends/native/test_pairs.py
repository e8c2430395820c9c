"""bfloat16 on a CPU: keys that share a factor, equal scores in both passes, exact sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import flashtile as ft
from flashtile.numerics.dtypes import narrow, widen
from tests.backends.native.core import needs_native
from tests.support.grid import Call, check_backward, check_forward, truth_of
from tests.support.runners import api_runner

pytestmark = needs_native
N_Q, N_K = 23, 27  # too many for decode


def numbers(rng, *shape):
    return narrow(rng.standard_normal(shape).astype(np.float32), "bfloat16")


def results(q, k, v, dout, **options):
    out, lse = ft.attention(q, k, v, return_lse=True, backend="native", **options)
    grads = ft.attention_backward(dout, q, k, v, out, lse, backend="native", **options)
    return [widen(x, np.float32) for x in (out, lse, *grads[:3])]


@pytest.mark.parametrize("dim", [7, 16])
def test_the_partner_of_a_key_has_no_effect(dim):
    """Wherever a band begins and ends, hidden neighbours of its keys change no bit."""
    rng = np.random.default_rng(dim)
    q, dout = numbers(rng, 1, 1, N_Q, dim), numbers(rng, 1, 1, N_Q, dim)
    k, v = numbers(rng, 1, 1, N_K, dim), numbers(rng, 1, 1, N_K, dim)
    for left, right, offset in itertools.product((-3, 0, 1, 2), (3, 4), range(-4, 4)):
        band = ft.Band(left, right, offset)
        i, j = np.arange(N_Q)[:, None], np.arange(N_K)
        seen = ((j - i - offset >= -left) & (j - i - offset <= right)).any(0)
        found = []
        for x in (0.0, np.nan, np.inf):
            other_k, other_v = k.copy(), v.copy()
            fill = narrow(np.float32([x]), "bfloat16")
            other_k[:, :, ~seen], other_v[:, :, ~seen] = fill, fill
            found.append(results(q, other_k, other_v, dout, band=band))
        for clean, *others in zip(*found, strict=True):
            for other in others:
                np.testing.assert_array_equal(other, clean)


@pytest.mark.parametrize("scale", [2000.0, 77.7e3])
def test_weights_of_large_scores_are_recomputed(scale):
    """The last bits of a score of 1e5 change its weight by hundredths: both passes must compute equal scores."""
    rng = np.random.default_rng(0)
    q, k, v = (numbers(rng, 2, 2, 60, 64) for _ in range(3))
    ones = narrow(np.ones(v.shape, np.float32), "bfloat16")
    _, lse, _, _, dv = results(q, k, v, ones, scale=scale)
    assert lse.min() > 1e4
    np.testing.assert_array_equal(dv.sum(2), 60)  # 60 rows, whose weights are 0 or 1


def test_threads_do_not_change_which_keys_are_a_pair():
    rng = np.random.default_rng(0)
    q, k, v = (numbers(rng, 1, 4, 96, 64) for _ in range(3))
    dout = rng.standard_normal(v.shape).astype(np.float32)
    for window in itertools.product((30, 31), (0, 1)):
        options = {"window": window, "out_dtype": "float32"}
        first, *others = (results(q, k, v, dout, threads=n, **options) for n in (1, 2, 3))
        for found in others:
            for x, y in zip(found, first, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("scale", [1e-38, 1e-41, 0.0])
def test_products_that_would_overflow_before_they_are_scaled(scale):
    rng = np.random.default_rng(0)
    large, v = narrow(np.full((1, 1, 20, 4), 1e20, np.float32), "bfloat16"), numbers(rng, 1, 1, 20, 4)
    out = ft.attention(large, large, v, scale=scale, out_dtype="float32", backend="native")
    np.testing.assert_allclose(out, np.broadcast_to(widen(v, np.float32).mean(2, keepdims=True), out.shape), atol=2e-3)


def test_a_hidden_key_does_not_change_the_smallest_gradients():
    """dbias is not rounded: it keeps numbers that are too small for a product."""
    rng = np.random.default_rng(3)
    q, k, v, dout = (numbers(rng, 1, 1, 20, 16) for _ in range(4))
    bias = np.zeros((1, 1, 20, 20), np.float32)
    bias[..., 3] = -84.5
    seen = np.ones((1, 1, 1, 20), bool)
    seen[..., 7] = False
    found = []
    for hidden in (0.0, np.nan):
        k[:, :, 7] = narrow(np.float32([hidden]), "bfloat16")
        out, lse = ft.attention(q, k, v, bias=bias, mask=seen, return_lse=True, backend="native")
        found.append(ft.attention_backward(dout, q, k, v, out, lse, bias=bias, mask=seen, backend="native"))
    clean, poisoned = found
    smallest = np.abs(clean.dbias[..., 3])
    assert ((smallest > 0) & (smallest < 2.0**-126)).any()
    for x, y in zip(clean[:4], poisoned[:4], strict=True):
        np.testing.assert_array_equal(widen(x, np.float32), widen(y, np.float32))


def test_gradients_from_a_wider_output():
    """dout is float32 then, and rounded for the products: delta must use the rounded values too."""
    rng = np.random.default_rng(1)
    q, k, v = (numbers(rng, 1, 4, 50, 33) for _ in range(3))
    dout = rng.standard_normal((1, 4, 50, 33)).astype(np.float32)
    options = {"out_dtype": "float32", "causal": True}
    agree(Call(q, k, v, options, dout, None))
    rounded = widen(narrow(dout, "bfloat16"), np.float32)
    for x, y in zip(results(q, k, v, dout, **options), results(q, k, v, rounded, **options), strict=True):
        np.testing.assert_array_equal(x, y)


def agree(call):
    runner, against = api_runner("native"), truth_of(call)
    out, lse = runner.forward(call)
    check_forward(call, against, out, lse)
    check_backward(call, against, runner.backward(call, out, lse))


@pytest.mark.parametrize("n_k", [32, 64, 256])
def test_sums_of_small_integers_are_exact(n_k):
    rng = np.random.default_rng(n_k)
    v = rng.integers(-8, 9, (1, 2, n_k, 24)).astype(np.float32)
    zeros = narrow(np.zeros((1, 2, 40, 24), np.float32), "bfloat16")
    keys = narrow(rng.integers(-8, 9, v.shape).astype(np.float32), "bfloat16")
    out = ft.attention(zeros, keys, narrow(v, "bfloat16"), out_dtype="float32", backend="native")
    np.testing.assert_array_equal(out, np.broadcast_to(v.mean(2, keepdims=True), out.shape))
