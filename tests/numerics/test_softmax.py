"""OnlineSoftmax: any chunking, any order of merging, rows that see no key, scores of any size."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashtile as ft
from flashtile.numerics.softmax import OnlineSoftmax, merge_normalized

rng = np.random.default_rng(0)
S = rng.standard_normal((5, 24)) * 3
V = rng.standard_normal((24, 4))


def whole(S: Any, V: Any) -> tuple[Any, Any]:
    top = S.max(axis=1, keepdims=True)
    P = np.exp(S - top)
    return P @ V / P.sum(axis=1, keepdims=True), (top + np.log(P.sum(axis=1, keepdims=True)))[:, 0]


def state_of(S: Any, V: Any, cuts: Any = (), sink: float | None = None) -> OnlineSoftmax:
    state = OnlineSoftmax.empty(len(S), V.shape[1], S.dtype, sink)
    for begin, end in itertools.pairwise([0, *cuts, S.shape[1]]):
        P, _ = state.absorb(S[:, begin:end])
        state.O = state.O + P @ V[begin:end]
    return state


def results(state: OnlineSoftmax) -> tuple[Any, Any]:
    return state.normalized(), state.lse()


def assert_same(a: OnlineSoftmax, b: OnlineSoftmax) -> None:
    for x, y in zip(results(a), results(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-13)


@given(st.lists(st.integers(0, 24), max_size=8).map(sorted))
def test_any_chunking_gives_the_same(cuts: list[int]) -> None:
    out, lse = results(state_of(S, V, cuts))
    exact_out, exact_lse = whole(S, V)
    np.testing.assert_allclose(out, exact_out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-13)


def test_absorb_gives_the_weights_and_the_factor() -> None:
    state = OnlineSoftmax.empty(5, 0, np.float64)
    P, factor = state.absorb(S[:, :10])
    assert not factor.any(), "there was nothing to rescale"
    np.testing.assert_allclose(P, np.exp(S[:, :10] - S[:, :10].max(axis=1, keepdims=True)))
    before = state.m.copy()
    P, factor = state.absorb(S[:, 10:])
    np.testing.assert_allclose(factor, np.exp(before - S.max(axis=1)))
    np.testing.assert_allclose(state.l, np.exp(S - S.max(axis=1, keepdims=True)).sum(axis=1))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_merge_in_any_order(order: tuple[int, ...]) -> None:
    parts = [slice(0, 5), slice(5, 17), slice(17, 24)]
    a, b, c = (state_of(S[:, parts[n]], V[parts[n]]) for n in order)
    left = OnlineSoftmax(a.m, a.l, a.O)
    left.merge(b)
    left.merge(c)  # (a b) c
    b.merge(c)
    a.merge(b)  # a (b c)
    assert_same(left, a)
    assert_same(left, state_of(S, V))


def test_merge_leaves_the_other_alone() -> None:
    a, b = state_of(S[:, :9], V[:9]), state_of(S[:, 9:], V[9:])
    before = [x.copy() for x in (b.m, b.l, b.O)]
    a.merge(b)
    for x, y in zip((b.m, b.l, b.O), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_empty_state_is_the_identity() -> None:
    full, empty = state_of(S, V), OnlineSoftmax.empty(5, 4, np.float64)
    exact = [x.copy() for x in results(full)]
    full.merge(empty)
    empty.merge(state_of(S, V))
    empty.merge(OnlineSoftmax.empty(5, 4, np.float64))
    for state in (full, empty):
        for x, y in zip(results(state), exact, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_row_that_saw_no_key() -> None:
    state = state_of(np.full((3, 6), -np.inf), V[:6], [2, 4])
    out, lse = results(state)
    assert not out.any() and np.isneginf(lse).all()
    state.merge(state_of(np.full((3, 6), -np.inf), V[:6]))
    out, lse = results(state)
    assert not out.any() and np.isneginf(lse).all()


def test_a_sink_is_a_key_with_value_zero() -> None:
    with_sink = state_of(S, V, [7], sink=1.5)
    extended = state_of(np.c_[np.full(5, 1.5), S], np.r_[np.zeros((1, 4)), V])
    assert_same(with_sink, extended)
    assert_same(state_of(S, V, sink=-np.inf), state_of(S, V))


@pytest.mark.parametrize("size", [1e3, 1e30, -1e3, -1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_of_any_size(size: float, dtype: Any) -> None:
    big = np.array([[size, size, 0], [0, size, -size], [-size, -size, -size]], dtype)
    out, lse = results(state_of(big, np.eye(3, dtype=dtype), [1, 2]))
    expected = np.exp(np.where(big == big.max(axis=1, keepdims=True), 0.0, -np.inf))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_allclose(lse, big.max(axis=1) + np.log([1 / p.max() for p in expected]), rtol=1e-6)


def test_merge_normalized() -> None:
    a, b = whole(S[:, :10], V[:10]), whole(S[:, 10:], V[10:])
    out, lse = merge_normalized(*a, *b)
    exact_out, exact_lse = whole(S, V)
    np.testing.assert_allclose(out, exact_out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-13)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 8), (4, 1), (0, 5), (3, 0)], ids=str)
def test_online_softmax(shape: tuple[int, ...], chunk: int) -> None:
    x = np.random.default_rng(1).standard_normal(shape)
    e = np.exp(x)
    np.testing.assert_allclose(ft.online_softmax(x, chunk), e / e.sum(axis=-1, keepdims=True), rtol=1e-13)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_online_softmax_of_extremes(chunk: int) -> None:
    x = np.array([[1000.0, -1000, 1000, 0], [1e30, -1e30, 0, 1e30], [-np.inf] * 4, [-np.inf, 3, -np.inf, 3]])
    expected = [[0.5, 0, 0.5, 0], [0.5, 0, 0, 0.5], [0, 0, 0, 0], [0, 0.5, 0, 0.5]]
    np.testing.assert_array_equal(ft.online_softmax(x, chunk), expected)
    np.testing.assert_array_equal(ft.online_softmax(x.astype(np.float32), chunk), expected)


def test_online_softmax_of_float16_sums_in_float32() -> None:
    """In float16, 4096 weights of 1 sum to 2048."""
    found = ft.online_softmax(np.zeros((1, 4096), np.float16), 1)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 1 / 4096, rtol=1e-6)
