"""Spans on a CPU: their cuts are those of spans.py, those of a band give its bits, and hidden keys have no effect."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.band import FAR, Band
from flashtile.numerics.dtypes import narrow, widen
from flashtile.numerics.visibility import Visibility
from tests.backends.native.core import c_span_cuts, needs_native
from tests.support import brute_force
from tests.support.grid import Call, check_backward, check_forward, truth_of
from tests.support.runners import api_runner
from tests.test_spans import all_limits

pytestmark = needs_native

DTYPES = ("float32", "float64", "bfloat16", "float16")


def check_cuts(band: Band, limits: Any, rows: int, n_cols: int, block: int) -> None:
    """Compare the cuts of all rows of tiles, of `rows` queries each."""
    exact = Visibility(band, limits).rows(len(limits), n_cols, rows, block)
    for n, wanted in enumerate(exact):
        first, last = n * rows, min(n * rows + rows, len(limits))
        found = c_span_cuts(band, first, last, n_cols, block, limits[first:last])
        assert found == tuple((c.begin, c.full_begin, c.full_end, c.end) for c in wanted), (limits[first:last], block)


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_cuts_of_all_small_spans(count: int, rows: int) -> None:
    """Every combination of limits in a row of tiles."""
    queries = all_limits(count, 5 if count == 1 else 4)
    together = np.array(list(itertools.product(range(len(queries)), repeat=rows))).ravel()
    for n_cols, block in itertools.product((0, 3, 4), (1, 2, 3)):
        check_cuts(Band(), queries[together], rows, n_cols, block)


def test_cuts_of_spans_in_a_band() -> None:
    rng = np.random.default_rng(0)
    bands = [Band(*b) for b in itertools.product((-3, 0, 2, FAR), (-1, 0, 3, FAR), (-4, 0, 3))]
    for count, band in itertools.product((1, 2, 3, 8), bands):
        ends = np.sort(rng.integers(0, 15, (7, count, 2)).reshape(7, -1)).reshape(7, count, 2)
        ends[rng.random((7, count)) < 0.2] = 3
        ends = np.sort(ends.reshape(7, -1)).reshape(7, count, 2)
        limits = ft.Spans(ends[None, None, ..., 0], ends[None, None, ..., 1]).limits[0, 0]
        for rows, n_cols, block in itertools.product((1, 3, 7), (1, 9, 12), (1, 2, 5)):
            check_cuts(band, limits, rows, n_cols, block)


def numbers(rng: Any, dtype: str, *shape: int) -> Any:
    return narrow(rng.standard_normal(shape), dtype)


def results(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[Any]:
    out, lse = ft.attention(q, k, v, return_lse=True, backend="native", **options)
    grads = ft.attention_backward(dout, q, k, v, out, lse, backend="native", **options)
    return [widen(x, np.float64) for x in (out, lse, *grads) if x is not None]


def same(found: list[Any], wanted: list[Any]) -> None:
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


BANDS = {
    "causal": Band(right=0),
    "window": Band(37, 0),
    "window to both sides": Band(20, 50, 3),
    "far": Band(-70, 130),
    "beyond": Band(300, -250, 5),
}
SIZES = {
    "blocks": (1, 2, 2, 700, 700, 64),
    "ragged": (2, 4, 2, 301, 413, 33),
    "few": (1, 4, 1, 3, 700, 64),
    "one": (2, 8, 2, 1, 1500, 16),
    "split": (1, 1, 1, 60, 2500, 32),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("band", BANDS)
def test_the_bits_of_a_band(band: str, size: str, dtype: str) -> None:
    batch, heads, kv_heads, n_q, n_k, dim = SIZES[size]
    rng = np.random.default_rng(0)
    q, dout = (numbers(rng, dtype, batch, heads, n_q, dim) for _ in range(2))
    k, v = (numbers(rng, dtype, batch, kv_heads, n_k, dim) for _ in range(2))
    b = BANDS[band].shifted(n_k - n_q if n_q <= 3 else 0)
    rows = range(n_q)
    seen = [max(b.begin(i), 0) for i in rows], [max(b.end(i), 0) for i in rows]
    same(results(q, k, v, dout, spans=ft.Spans(*seen)), results(q, k, v, dout, band=b))


def test_the_bits_of_lengths() -> None:
    """Padding at the end, and to the left of a cache."""
    rng = np.random.default_rng(1)
    lengths = np.array([5, 0, 300])
    for n_q in (1, 40):
        q, dout = (numbers(rng, "float32", 3, 4, n_q, 32) for _ in range(2))
        k, v = (numbers(rng, "float32", 3, 2, 300, 32) for _ in range(2))
        found = results(q, k, v, dout, spans=ft.Spans(0, lengths[:, None, None]))
        same(found, results(q, k, v, dout, kv_lengths=lengths))
        begin = 300 - lengths[:, None, None]
        for n, length in enumerate(lengths):
            rows = [x[n : n + 1] for x in (q, k, v, dout)]
            padded = results(*rows, spans=ft.Spans(begin[n], 300))
            rows[1:3] = (x[:, :, 300 - length :] for x in rows[1:3])
            alone = results(*rows)
            for x, y in zip(padded[:3], alone[:3], strict=True):
                np.testing.assert_allclose(x, y, atol=2e-6)


def random_spans(rng: Any, shape: tuple[int, ...], count: int, n_k: int) -> ft.Spans:
    """Spans that are empty, touch, or end beyond the keys, all over the place."""
    ends = np.sort(rng.integers(0, n_k + 9, (*shape, 2 * count)), axis=-1).reshape(*shape, count, 2)
    touch = rng.random((*shape, count)) < 0.3
    ends[..., :-1, 1] = np.where(touch[..., :-1], ends[..., 1:, 0], ends[..., :-1, 1])
    begin, end = ends[..., 0], ends[..., 1]
    return ft.Spans(begin, np.where(rng.random(begin.shape) < 0.2, begin, end))


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("n_q", [1, 3, 20])
def test_random_spans_by_definition(n_q: int, count: int) -> None:
    rng = np.random.default_rng(count)
    q, k, v = (rng.standard_normal((2, h, n, 5)) for h, n in ((4, n_q), (2, 23), (2, 23)))
    spans = random_spans(rng, (2, 4, n_q), count, 23)
    both: list[dict[str, Any]] = [{}, {"causal": True}]
    for options in both:
        out, lse = ft.attention(q, k, v, spans=spans, return_lse=True, backend="native", **options)
        exact, exact_lse = brute_force.attention(q, k, v, spans=spans, **options)[:2]
        np.testing.assert_allclose(out, exact, atol=1e-12)
        np.testing.assert_allclose(lse, exact_lse, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("n_q", [1, 3, 40])
def test_spans_of_split_keys(n_q: int, count: int) -> None:
    """So few queries that threads share the keys of each."""
    rng = np.random.default_rng(n_q)
    q, k, v, dout = (rng.standard_normal((1, 1, n, 8)) for n in (n_q, 4000, 4000, n_q))
    call = Call(q, k, v, {"spans": random_spans(rng, (1, 1, n_q), count, 4000)}, dout, None)
    runner, against = api_runner("native"), truth_of(call)
    out, lse = runner.forward(call)
    check_forward(call, against, out, lse)
    check_backward(call, against, runner.backward(call, out, lse))


def documents(lengths: list[int], causal: bool) -> ft.Spans:
    ends = np.cumsum(lengths)
    begin, i = np.repeat(ends - lengths, lengths), np.arange(ends[-1])
    return ft.Spans(begin, i + 1 if causal else np.repeat(ends, lengths))


LENGTHS = [1, 100, 3, 2, 5, 40, 48, 70, 300, 17, 16, 130]
SHAPES = {
    "random": lambda rng, n: random_spans(rng, (1, 2, n), 4, n),
    "shared by heads": lambda rng, n: random_spans(rng, (2, 1, n), 2, n),
    "documents": lambda rng, n: documents(LENGTHS, causal=False),
    "causal documents": lambda rng, n: documents(LENGTHS, causal=True),
    "padding": lambda rng, n: ft.Spans(0, np.where(np.arange(n) < 400, 400, 0)),
    "first keys and a window": lambda rng, n: first_keys_and_window(n, 5, 60),
}


def first_keys_and_window(n: int, first: int, width: int) -> ft.Spans:
    i = np.arange(n)
    begin, end = (0 * i, np.maximum(i - width, first)), (np.minimum(i + 1, first), i + 1)
    return ft.Spans(*(np.stack(x, -1)[None, None] for x in (begin, end)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_long_sequences(shape: str, dtype: str) -> None:
    """Rows of tiles in which some tiles are skipped and some are full, forward and backward, for any threads."""
    rng = np.random.default_rng(2)
    n = sum(LENGTHS)
    q, dout = (numbers(rng, dtype, 2, 2, n, 24) for _ in range(2))
    k, v = (numbers(rng, dtype, 2, 1, n, 24) for _ in range(2))
    options = {"spans": SHAPES[shape](rng, n)}
    call = Call(q, k, v, options, dout, None)
    runner, against = api_runner("native", threads=2), truth_of(call)
    out, lse = runner.forward(call)
    check_forward(call, against, out, lse)
    check_backward(call, against, runner.backward(call, out, lse))
    first, *others = (results(q, k, v, dout, threads=threads, **options) for threads in (1, 2, 5))
    for found in others:
        same(found, first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_q", [2, 40, 200])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_keys_have_no_effect(n_q: int, dtype: str, value: float) -> None:
    """Not on rows that do not see them, and not on any gradient if no row sees them."""
    rng = np.random.default_rng(n_q)
    n_k = 3 * n_q
    i = np.arange(n_q)[None, None, :, None]
    begin = 3 * i + np.array([-40, -11, 6]) + rng.integers(0, 3, (1, 2, n_q, 3))
    spans = ft.Spans(np.maximum(begin, 7), np.maximum(begin + np.array([9, 10, 15]), 7))
    q, dout = (numbers(rng, dtype, 1, 2, n_q, 16) for _ in range(2))
    k, v = (numbers(rng, dtype, 1, 2, n_k, 16) for _ in range(2))
    seen = spans.to_mask(n_k)
    clean = results(q, k, v, dout, spans=spans)
    poison = narrow(np.array([value]), dtype)[0]
    for hidden in (~seen.any((0, 1, 2)), np.arange(n_k) % 37 == 2):
        other_k, other_v = k.copy(), v.copy()
        other_k[:, :, hidden], other_v[:, :, hidden] = poison, poison
        found = results(q, other_k, other_v, dout, spans=spans)
        reached = (seen & hidden).any(-1)
        assert not reached.all()
        for x, y in zip(found[:3], clean[:3], strict=True):  # out, lse, dq
            np.testing.assert_array_equal(x[~reached], y[~reached])
        if not reached.any():
            same(found, clean)


def test_bands_whose_cuts_differ_by_column() -> None:
    """Key blocks add to dQ in turns: all are taken, also where a band ends within a ragged block."""
    rng = np.random.default_rng(0)
    for n_q, n_k in ((1, 193), (3, 400), (100, 500), (193, 7)):
        q, k = (rng.standard_normal((1, 1, n, 8)) for n in (n_q, n_k))
        for band in (ft.Band(81, -8, 68), ft.Band(-8, 81, -68), ft.Band(300, -90, 200), ft.Band(0, 0, n_k - 2)):
            out, lse = ft.attention(q, k, k, band=band, return_lse=True)
            found, wanted = (
                ft.attention_backward(out, q, k, k, out, lse, band=band, backend=name) for name in ("native", "tiles")
            )
            for x, y in zip(found[:3], wanted[:3], strict=True):
                np.testing.assert_allclose(x, y, atol=1e-12)
