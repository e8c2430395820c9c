"""merge(): against its definition in float64, into given arrays, in place, and many in a row."""

from __future__ import annotations

import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashtile as ft
from flashtile import partials
from flashtile.backends.native import library
from flashtile.numerics.dtypes import carrier, name_of, narrow, widen

DTYPES = ("float16", "bfloat16", "float32", "float64")
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
BY = [
    pytest.param("native", marks=pytest.mark.skipif(bool(library.why_not()), reason="no compiled core")),
    "numpy",
]


def by(way: str) -> Any:
    """By the C++ core, or without it."""
    return mock.patch.object(partials.library, "why_not", lambda: None if way == "native" else "not wanted here")


@pytest.fixture(params=BY)
def way(request: pytest.FixtureRequest) -> Any:
    with by(request.param):
        yield


def definition(results: list[Any]) -> tuple[Any, Any]:
    """The merged result in float64, row by row; a result with lse -inf counts for nothing."""
    outs, lses = ([np.float64(widen(x, np.float64)) for x in results[n::2]] for n in (0, 1))
    out, lse = np.zeros(outs[0].shape), np.full(lses[0].shape, -np.inf)
    for row in np.ndindex(lse.shape):
        seen = [n for n in range(len(lses)) if not np.isneginf(lses[n][row])]
        if seen:
            lse[row] = np.logaddexp.reduce([lses[n][row] for n in seen])
            out[row] = sum(np.exp(lses[n][row] - lse[row]) * outs[n][row] for n in seen)
    return out, lse


def error_allowed(results: list[Any], out: Any, lse: Any) -> tuple[float, float]:
    """Of out and lse: their own rounding, and that of sums; an lse's error is one of the weights."""
    names = [name_of(x.dtype) for x in (*results, out, lse)]
    sums = EPS["float64" if "float64" in names or len(results) > 4 else "float32"]
    largest = max([1.0, *(float(np.abs(x[np.isfinite(x)]).max(initial=0)) for x in map(widen, results[1::2]))])
    weights = 8 * largest * sums
    return 8 * (EPS[name_of(out.dtype)] + weights), 8 * largest * (EPS[name_of(lse.dtype)] + sums)


@st.composite
def problems(draw: Any) -> tuple[list[Any], Any, int]:
    """Results, a place to write to (None: a new one), and whose place that is (-1: nobody's)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    width = draw(st.sampled_from((0, 1, 3, 16, 257)))
    count = draw(st.integers(2, 5))

    def view(x: Any, name: str) -> Any:
        """x in this dtype, in memory of any order with gaps between rows."""
        order = draw(st.permutations(range(len(shape)))) + list(range(len(shape), x.ndim))
        gap = draw(st.integers(0, 2))
        base = np.zeros([x.shape[a] + gap for a in order], carrier(name))
        inside = base[(*(slice(x.shape[a]) for a in order), ...)]  # with ..., an array even without axes
        found = inside.transpose(np.argsort(order))
        found[...] = narrow(x, name)
        return found

    results = []
    for _ in range(count):
        lse = np.asarray(rng.standard_normal(shape) * draw(st.sampled_from((1.0, 30.0))))
        lse[rng.random(shape) < 0.2] = -np.inf
        out = rng.standard_normal((*shape, width))
        out[np.isneginf(lse)] = rng.choice([0.0, np.nan, np.inf])  # nobody's memory
        results += [view(out, draw(st.sampled_from(DTYPES))), view(lse, draw(st.sampled_from(DTYPES)))]
    into, place = None, -1
    if draw(st.booleans()):
        lse_name = draw(st.sampled_from(DTYPES[2:]))
        into = view(np.zeros((*shape, width)), draw(st.sampled_from(DTYPES))), view(np.zeros(shape), lse_name)
        places = [n for n in range(count) if name_of(results[2 * n + 1].dtype) in DTYPES[2:]]
        if places and draw(st.booleans()):
            place = draw(st.sampled_from(places))
            into = results[2 * place], results[2 * place + 1]
    return results, into, place


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("how", BY)
@given(problem=problems())
def test_the_definition(how: str, problem: tuple[list[Any], Any, int]) -> None:
    results, into, place = problem
    before = [x.copy() for x in results]
    wanted = definition(results)
    with by(how):
        out, lse = ft.merge(*results, into=into)
    if into is None:
        assert out.dtype == results[0].dtype
    else:
        assert out is into[0] and lse is into[1]
    for found, exact, error in zip((out, lse), wanted, error_allowed(before, out, lse), strict=True):
        np.testing.assert_allclose(np.float64(widen(found, np.float64)), exact, atol=error, rtol=error)
    for n, x in enumerate(results):  # only what was asked for is written
        if n // 2 != place:
            np.testing.assert_array_equal(widen(x), widen(before[n]))


def test_both_ways_agree_on_what_is_not_finite() -> None:
    """NaN and Inf in out or lse, in rows that count."""
    numbers = [0.0, 1.0, -np.inf, np.inf, np.nan, 800.0]
    lse_a, lse_b = (np.ascontiguousarray(x, np.float32) for x in np.meshgrid(numbers, numbers))
    for special in (1.0, np.inf, np.nan):
        a, b = np.ones((6, 6, 3), np.float32), np.full((6, 6, 3), special, np.float32)
        found = ft.merge(a, lse_a, b, lse_b)
        wanted = partials.merge_normalized(a, lse_a, b, lse_b)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.usefixtures("way")
def test_a_view_of_rows() -> None:
    """Only the rows of the view are written, by merging shares into a part of larger arrays."""
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((2, 3, 20, 8)), rng.standard_normal((2, 3, 20))
    whole, part = (out.copy(), lse.copy()), (rng.standard_normal((2, 3, 7, 8)), rng.standard_normal((2, 3, 7)))
    rows = slice(1, 20, 3)
    into = out[:, :, rows], lse[:, :, rows]
    wanted = definition([*into, *part])
    assert ft.merge(*into, *part, into=into) is not None
    np.testing.assert_allclose(out[:, :, rows], wanted[0], atol=1e-14)
    np.testing.assert_allclose(lse[:, :, rows], wanted[1], atol=1e-14)
    others = np.setdiff1d(np.arange(20), np.arange(20)[rows])
    np.testing.assert_array_equal(out[:, :, others], whole[0][:, :, others])
    np.testing.assert_array_equal(lse[:, :, others], whole[1][:, :, others])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("dtype", "bar"), [("float32", 4e-6), ("float64", 1e-14)])
def test_many_in_a_row(dtype: str, bar: float) -> None:
    """A thousand bfloat16 results, accumulated in place: the accumulators' own rounding, and no more."""
    rng = np.random.default_rng(0)
    outs = narrow(rng.standard_normal((1000, 4, 64)).astype(np.float32), "bfloat16")
    shares = list(zip(outs, rng.standard_normal((1000, 4)), strict=True))
    exact = definition([x for share in shares for x in share])
    into = np.full((4, 64), np.nan, dtype), np.full(4, -np.inf, dtype)
    for share in shares:
        ft.merge(*into, *share, into=into)
    for found, wanted in zip(into, exact, strict=True):
        assert np.abs(found - wanted).max() < bar


def test_many_in_a_row_need_no_new_memory() -> None:
    if library.why_not():
        pytest.skip("no compiled core")
    out, lse = np.ones((256, 256), np.float32), np.zeros(256, np.float32)
    part = out[:, ::-1].copy(), lse.copy()
    ft.merge(out, lse, *part, into=(out, lse))
    tracemalloc.start()
    try:
        for _ in range(50):
            ft.merge(out, lse, *part, into=(out, lse))
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < out.nbytes / 16 and now < 4096  # lists of strides and the like


def test_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.why_not():
        pytest.skip("no compiled core")
    rng = np.random.default_rng(0)
    results = [x for _ in range(2) for x in (rng.standard_normal((3, 700, 33)), rng.standard_normal((3, 700)))]
    into = [(np.empty((3, 700, 33)), np.empty((3, 700))) for _ in range(2)]
    for n, to in zip((1, 5), into, strict=True):
        partials.merge_arrays(results, to, n)
    for one, many in zip(*into, strict=True):
        np.testing.assert_array_equal(one, many)
