"""Spans: what they accept, how they cut rows and columns of tiles, and calls with them against a mask."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile as ft
from flashtile.band import Band, Kind
from flashtile.cost import traffic
from flashtile.numerics.schedule import Grid, backward, fa1_forward, fa2_forward
from flashtile.numerics.visibility import Visibility
from tests.support.grid import random_array
from tests.support.runners import Runner, every_array_runner


def random_spans(rng: np.random.Generator, n_q: int, n_k: int, count: int, *axes: int) -> ft.Spans:
    """Rising spans; some are empty, some touch, and some end beyond the last key."""
    ends = np.sort(rng.integers(0, n_k + 3, (*axes, n_q, 2 * count)), -1)
    begin, end = ends[..., ::2], ends[..., 1::2]
    begin[..., 1:] = np.where(rng.random(begin[..., 1:].shape) < 0.2, end[..., :-1], begin[..., 1:])
    end = np.where(rng.random(end.shape) < 0.2, begin, end)
    return ft.Spans(*(x[(None,) * (4 - x.ndim)] for x in (begin, end)))


def all_limits(count: int, most: int) -> Any:
    """All limits of a query with this many spans and ends up to `most`: (queries, spans, 2)."""
    ends = np.array(list(itertools.combinations_with_replacement(range(most + 1), 2 * count)))
    ends = ends.reshape(1, 1, -1, count, 2)
    return np.unique(ft.Spans(ends[..., 0], ends[..., 1]).limits[0, 0], axis=0)


BANDS = (Band(), Band(right=0), Band(2, 1, -1), Band(-1, 3, 2), Band(-3, 2))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_cuts(band: Band, count: int) -> None:
    """Each visible pair is in a tile, each full tile is visible throughout, and no tile comes twice."""
    rng = np.random.default_rng(count)
    for n_q, n_k, br, bc in itertools.product((1, 2, 5, 8), (0, 1, 4, 9), (1, 2, 3, 8), (1, 2, 4, 10)):
        for _ in range(6):
            visible = Visibility(band, random_spans(rng, n_q, n_k, count).limits[0, 0])
            i, j = np.arange(n_q)[:, None], np.arange(n_k)[None]
            seen, grid = visible.keep(i, j), Grid(n_q, n_k, br, bc)
            where = (visible.limits.tolist(), n_q, n_k, br, bc)
            transposed: list[list[tuple[int, Kind]]] = [[] for _ in range(grid.shape[1])]
            for row in range(grid.shape[0]):
                tiles = list(grid.across(visible, row))
                assert [n for n, _ in tiles] == sorted({n for n, _ in tiles}), where
                kinds = dict(tiles)
                for column in range(grid.shape[1]):
                    tile = seen[grid.rows(row), grid.cols(column)]
                    kind = kinds.get(column, Kind.SKIPPED)
                    assert kind is not Kind.SKIPPED or not tile.any(), where
                    assert kind is not Kind.FULL or (tile.all() and tile.shape[1] == bc), where
                    if kind is not Kind.SKIPPED:
                        transposed[column].append((row, kind))
            assert [list(grid.down(visible, column)) for column in range(grid.shape[1])] == transposed, where


@pytest.mark.parametrize(("count", "br"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("band", [Band(), Band(1, 2, 0)], ids=str)
def test_cuts_of_all_small_spans(band: Band, count: int, br: int) -> None:
    """Every combination of limits in a row of tiles, one row of tiles below the other."""
    queries = all_limits(count, 4)
    limits = queries[np.array(list(itertools.product(range(len(queries)), repeat=br))).ravel()]
    n_q = len(limits)
    for n_k, bc in itertools.product((0, 3, 4), (1, 2, 3)):
        visible = Visibility(band, limits)
        tiles = np.zeros((n_q // br, br, -(-n_k // bc), bc), bool)
        keep = visible.keep(np.arange(n_q)[:, None], np.arange(n_k)[None])
        tiles.reshape(n_q, tiles.shape[2] * bc)[:, :n_k] = keep
        some, every = tiles.any((1, 3)), tiles.all((1, 3))
        kinds = np.zeros(some.shape, int)  # visits, and among them those as full tiles
        full = np.zeros(some.shape, int)
        for row, cuts in enumerate(visible.rows(n_q, n_k, br, bc)):
            for column, kind in itertools.chain(*cuts):
                kinds[row, column] += 1
                full[row, column] += kind is Kind.FULL
        assert kinds.max(initial=0) <= 1, "visited twice"
        assert (kinds >= some).all() and (every >= full).all()
        if count == 1 and br == 1 and band == Band():  # a band may make rows without keys
            assert (kinds == some).all() and (full == every).all()
        down = np.zeros_like(kinds), np.zeros_like(full)
        for column, visits in enumerate(visible.columns(n_q, n_k, br, bc)):
            assert [row for row, _ in visits] == sorted(row for row, _ in visits)
            for row, kind in visits:
                down[0][row, column] += 1
                down[1][row, column] += kind is Kind.FULL
        assert (down[0] == kinds).all() and (down[1] == full).all()


def test_cuts_are_tight() -> None:
    """Only tiles with a visible pair are computed. Where all rows of a tile have both spans, whole ones are full."""
    spans = ft.masks.sink_window(left=20, sinks=4, n_q=64)
    visible = Visibility(Band(), spans.limits[0, 0])
    seen, grid = np.asarray(spans.to_mask(64))[0, 0], Grid(64, 64, 4, 4)
    for row in range(16):
        kinds = dict(grid.across(visible, row))
        for column in range(16):
            tile = seen[grid.rows(row), grid.cols(column)]
            kind = Kind.FULL if tile.all() else Kind.PARTIAL if tile.any() else Kind.SKIPPED
            found = kinds.get(column, Kind.SKIPPED)
            assert (found is Kind.SKIPPED) == (kind is Kind.SKIPPED), (row, column)
            assert found is kind or row < 8, (row, column)


def test_spans_like_a_band_cut_like_it() -> None:
    for band, n_q, n_k, br, bc in itertools.product(BANDS[:3], (1, 7, 16), (7, 16), (1, 3, 8), (1, 4, 8)):
        i = np.arange(n_q)
        visible = Visibility(Band(), ft.Spans(band.begin(i), band.end(i)).limits[0, 0])
        grid = Grid(n_q, n_k, br, bc)
        i, j = np.arange(n_q)[:, None], np.arange(n_k)
        assert (visible.keep(i, j[None]) == band.keep(i, j[None])).all()
        assert visible.pairs(n_q, n_k) == traffic.visible_pairs(band, n_q, n_k)
        if band.keep(i, j[None]).any(axis=1).all():  # a band is cut by its limits, where nothing is visible too
            rows = [list(grid.across(visible, n)) for n in range(grid.shape[0])]
            assert rows == [list(grid.across(band, n)) for n in range(grid.shape[0])]


@pytest.mark.parametrize("count", [1, 3])
def test_traffic_counts_what_the_events_move(count: int) -> None:
    rng = np.random.default_rng(0)
    for n_q, n_k, br, bc in itertools.product((1, 7, 12), (5, 12), (1, 4, 5), (3, 4)):
        visible = Visibility(Band(right=6), random_spans(rng, n_q, n_k, count).limits[0, 0])
        grid, layout = Grid(n_q, n_k, br, bc), traffic.Layout(6, 10)
        shape = (n_q, n_k, 6, 10, br, bc, visible)
        for events, elements in (
            (fa2_forward, traffic.fa2_elements),
            (fa1_forward, traffic.fa1_visible_elements),
            (backward, traffic.backward_elements),
        ):
            assert traffic.count(events(visible, grid), grid, layout).elements == elements(*shape)
        seen = visible.keep(np.arange(n_q)[:, None], np.arange(n_k)[None])
        assert traffic.visible_pairs(visible, n_q, n_k) == seen.sum()
        assert traffic.keys_seen(visible, n_q, n_k) == seen.any(0).sum()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1))
@every_array_runner
def test_spans_equal_their_mask(runner: Runner, seed: int) -> None:
    """A call with random spans gives what a call with the dense mask gives, forward and backward, with NaN in V where
    nobody looks.
    """
    rng = np.random.default_rng(seed)
    batch, group, kv_heads, n_q, n_k = (int(n) for n in rng.integers((1, 1, 1, 1, 1), (3, 3, 3, 40, 60)))
    heads = group * kv_heads
    axes = [n if rng.random() < 0.5 else 1 for n in (batch, heads)]
    spans = random_spans(rng, n_q, n_k, int(rng.integers(1, 9)), *axes)
    options: dict[str, Any] = {"causal": True} if rng.random() < 0.3 else {}
    q, k, v = (
        random_array(rng, (batch, h, n, 8), "float64") for h, n in ((heads, n_q), (kv_heads, n_k), (kv_heads, n_k))
    )
    dout = random_array(rng, (batch, heads, n_q, 8), "float64")
    mask = np.asarray(spans.to_mask(n_k))
    seen = np.broadcast_to(mask, (batch, heads, n_q, n_k)).reshape(batch, kv_heads, -1, n_k).any(2)
    hidden = np.where(seen[..., None], v, np.nan)
    from tests.support.grid import Call

    with_spans = Call(q, k, hidden, {"spans": spans, **options}, dout, None)
    with_mask = Call(q, k, v, {"mask": mask, **options}, dout, None)
    if runner.refusal(with_spans):
        pytest.skip("no spans")
    out, lse = runner.forward(with_spans)
    wanted, wanted_lse = runner.forward(with_mask)
    np.testing.assert_allclose(out, wanted, atol=1e-13)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-13)
    found = runner.backward(with_spans, out, lse)
    for x, y in zip(found[:3], runner.backward(with_mask, wanted, wanted_lse)[:3], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_normal_form() -> None:
    """Values are clipped, and an empty span lies where the one before it ends."""
    spans = ft.Spans([[[[-5, 9, 4, 2**40]]]], [[[[3, 2, 6, 2**41]]]])
    assert spans.limits.tolist() == [[[[[0, 3], [3, 3], [4, 6], [6, 6]]]]]
    assert spans.limits.dtype == np.int32 and spans.begin.tolist() == [[[[0, 3, 4, 6]]]]
    assert ft.Spans(0, np.uint64(2**63)).limits.tolist() == [[[[[0, 2**31 - 1]]]]]
    assert ft.Spans(-(2**70), 2**70).limits.tolist() == [[[[[0, 2**31 - 1]]]]]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_any_width(dtype: str) -> None:
    numbers = np.array([0, 5, min(np.iinfo(dtype).max, 2**64 - 1)], dtype)
    wanted = [0, 5, min(int(numbers[2]), 2**31 - 1)]
    assert ft.Spans(0, numbers).end.flatten().tolist() == wanted
    torch = pytest.importorskip("torch")
    assert ft.Spans(0, torch.from_numpy(numbers)).end.flatten().tolist() == wanted
    assert ft.Spans(-(2**70), torch.from_numpy(numbers)).end.flatten().tolist() == wanted


@pytest.mark.parametrize(
    ("begin", "end", "error", "words"),
    [
        (0.5, 3, ft.DTypeError, "integers"),
        (True, 3, ft.DTypeError, "integers"),
        ("a", 3, ft.DTypeError, "integers"),
        (np.zeros((1, 1, 1, 1, 1), int), 3, ft.ShapeError, "up to"),
        (np.zeros((1, 1, 4, 2), int), np.zeros(4, int), ft.ShapeError, "both of"),
        (np.zeros(4, int), np.zeros(5, int), ft.ShapeError, "broadcast"),
        (np.zeros((1, 1, 4, 9), int), 3, ft.ShapeError, "1 to 8 spans"),
        (np.zeros((1, 1, 4, 0), int), 3, ft.ShapeError, "1 to 8 spans"),
        ([[[[0, 2]]]], [[[[3, 5]]]], ft.ShapeError, r"disjoint.*\(0, 3\), \(2, 5\).*\(0, 0, 0\)"),
        ([[[[4, 0]]]], [[[[5, 2]]]], ft.ShapeError, "rising"),
    ],
)
def test_wrong_spans(begin: Any, end: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ft.Spans(begin, end)


@pytest.mark.parametrize(
    ("spans", "error", "words"),
    [
        (np.zeros((1, 1, 1, 1, 2), np.int32), ft.DTypeError, "flashtile.Spans"),
        (ft.Spans.of(np.zeros((1, 1, 5, 9, 2), np.int32)), ft.ShapeError, "1 to 8 spans"),
        (ft.Spans.of(np.zeros((1, 1, 5, 0, 2), np.int32)), ft.ShapeError, "1 to 8 spans"),
        (ft.Spans.of(np.zeros((1, 1, 5, 2, 3), np.int32)), ft.ShapeError, "limits of"),
        ((0, 3), ft.DTypeError, "flashtile.Spans"),
        (ft.Spans(np.zeros((3, 1, 1), int), 3), ft.ShapeError, "1 or 2 along batch, got 3"),
        (ft.Spans(np.zeros((1, 3, 1), int), 3), ft.ShapeError, "1 or 4 along heads, got 3"),
        (ft.Spans(np.zeros(6, int), 3), ft.ShapeError, "1 or 5 along queries, got 6"),
    ],
)
def test_wrong_spans_of_a_call(spans: Any, error: type[Exception], words: str) -> None:
    q = np.zeros((2, 4, 5, 8), np.float32)
    for call in (ft.attention, ft.standard_attention):
        with pytest.raises(error, match=f"spans: .*{words}"):
            call(q, q, q, spans=spans)
    with pytest.raises(error, match=f"spans: .*{words}"):
        ft.plan((2, 4, 5, 8), (2, 4, 5, 8), spans=spans)


def test_plan_counts_tiles() -> None:
    """Eight documents cost an eighth; sequences with spans of their own are counted apart."""
    shape, lengths = (2, 4, 1024, 64), np.full(8, 128)
    spans = ft.masks.documents(lengths=lengths)
    found = ft.plan(shape, shape, backend="tiles", spans=spans)
    assert found.pairs == 2 * 4 * 8 * 128**2
    assert found.tiles == {"skipped": 8 * 56, "partial": 0, "full": 8 * 8}
    assert found.span_bytes == spans.limits.nbytes == 1024 * 8
    assert found.cut_bytes == 2 * 8 * 16, "a span of each row of tiles, of two sequences"
    assert ft.plan(shape, shape, causal=True).span_bytes == ft.plan(shape, shape).cut_bytes == 0
    both = np.stack([spans.begin[0, :, :, 0], np.zeros((1, 1024), int)])
    own = ft.Spans(both, np.stack([spans.end[0, :, :, 0], np.full((1, 1024), 1024)]))
    assert ft.plan(shape, shape, backend="tiles", spans=own).pairs == 4 * (8 * 128**2 + 1024**2)
    of_heads = ft.Spans(np.zeros((1, 4, 1), int), np.array([0, 128, 256, 1024])[None, :, None])
    found = ft.plan(shape, shape, backend="tiles", spans=of_heads)
    assert found.pairs == 2 * 1024 * (128 + 256 + 1024) and found.tiles["full"] == 2 * 8 * (1 + 2 + 8)
    assert found.cut_bytes == 2 * 4 * 8 * 16


def test_trace_has_only_visible_tiles() -> None:
    q = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    spans = ft.masks.documents(lengths=[8, 24])
    steps = ft.trace(q, q, q, block_q=8, block_k=8, spans=spans).steps
    tiles = [(s.event.i, s.event.j) for s in steps if type(s.event).__name__ == "Tile"]
    assert tiles == [(0, 0), *itertools.product((1, 2, 3), (1, 2, 3))]
