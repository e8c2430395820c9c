"""Bands and their cuts, exhaustively against brute force for small sizes, transposed too, in Python and C++."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

import flashtile as ft
from flashtile.band import FAR, Band, Cuts, Kind, cuts
from tests.backends.native.core import c_cuts, needs_native

EDGES = (-4, -1, 0, 1, 3, 6, FAR)
OFFSETS = (-8, -3, -1, 0, 2, 5, 9)
BANDS = [Band(*b) for b in itertools.product(EDGES, EDGES, OFFSETS)]


def rows_of_tiles() -> Iterator[tuple[int, int, int, int]]:
    """Yield first, last, n_cols and block for every row of tiles of every small grid."""
    for n_rows, n_cols, br, bc in itertools.product((1, 2, 5, 8), (0, 1, 4, 7, 9), (1, 2, 3, 8), (1, 2, 3, 4, 10)):
        for first in range(0, n_rows, br):
            yield first, min(first + br, n_rows), n_cols, bc


ROWS = sorted(set(rows_of_tiles()))


def kinds(band: Band, first: int, last: int, n_cols: int, block: int) -> list[Kind]:
    """Return the kind of each tile of the row, by a test of each pair."""
    i, j = np.arange(first, last)[:, None], np.arange(n_cols)[None, :]
    seen = (-band.left <= j - (i + band.offset)) & (j - (i + band.offset) <= band.right)
    found = []
    for at in range(0, n_cols, block):
        tile = seen[:, at : at + block]
        whole = tile.all() and tile.shape[1] == block  # a ragged tile needs a mask for the missing columns
        found.append(Kind.FULL if whole else Kind.PARTIAL if tile.any() else Kind.SKIPPED)
    return found


def as_kinds(c: Cuts, tiles: int) -> list[Kind]:
    found = [Kind.SKIPPED] * tiles
    for j, kind in c:
        found[j] = kind
    return found


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_cuts_exhaustively(transposed: bool) -> None:
    for band in BANDS:
        band = band.T if transposed else band
        for first, last, n_cols, block in ROWS:
            c = cuts(band, first, last, n_cols, block)
            exact = kinds(band, first, last, n_cols, block)
            where = (band, first, last, n_cols, block)
            assert 0 <= c.begin <= c.full_begin <= c.full_end <= c.end <= len(exact), where
            found = as_kinds(c, len(exact))
            if n_cols <= band.begin(first) < len(exact) * block and exact:
                # The rows see only columns beyond the last one, but within its ragged tile.
                assert exact[-1] is Kind.SKIPPED, where
                found[-1] = Kind.SKIPPED
            assert found == exact, where


@needs_native
def test_the_cpp_twin() -> None:
    for band in [*BANDS, *(band.T for band in BANDS)]:
        for first, last, n_cols, block in ROWS:
            c = cuts(band, first, last, n_cols, block)
            twin = c_cuts(band, first, last, n_cols, block)
            assert twin == (c.begin, c.full_begin, c.full_end, c.end), (band, first, last, n_cols, block)


@needs_native
def test_the_cpp_twin_at_large_offsets() -> None:
    """64-bit arithmetic: limits and offsets of 2**40 in either direction."""
    far = (-FAR, -(2**33), 0, 2**33, FAR)
    for left, right, offset in itertools.product(far, far, far):
        band = Band(left, right, offset)
        for row in ((0, 16, 100, 16), (2**34, 2**34 + 128, 2**35 + 7, 64)):
            c = cuts(band, *row)
            assert c_cuts(band, *row) == (c.begin, c.full_begin, c.full_end, c.end), (band, row)


@pytest.mark.parametrize("band", BANDS[::5], ids=str)
def test_transpose_swaps_the_roles(band: Band) -> None:
    i, j = np.arange(12)[:, None], np.arange(10)[None, :]
    np.testing.assert_array_equal(band.keep(i, j), band.T.keep(j, i))
    assert band == band.T.T


@pytest.mark.parametrize("band", BANDS[::5], ids=str)
def test_begin_and_end_bound_what_a_query_sees(band: Band) -> None:
    for i in range(6):
        seen = [j for j in range(-40, 60) if band.keep(i, j)]
        inside = range(max(band.begin(i), -40), min(band.end(i), 60))
        assert seen == list(inside)


def test_named_bands_are_values() -> None:
    assert ft.full() == Band()
    assert ft.causal() == Band(right=0)
    assert ft.window(3, 1) == Band(3, 1)
    assert ft.window() == ft.full() and ft.window(right=0) == ft.causal()
    assert ft.causal().shifted(5) == Band(right=0, offset=5)
    assert len({ft.full(), Band(), ft.causal()}) == 2, "bands are hashable values"


def test_a_ring_step_is_a_band() -> None:
    """Shares of the keys, each with a shifted band, make up the whole."""
    whole = Band(5, 2, 3)
    i = np.arange(20)[:, None]
    for share in range(0, 24, 6):
        j = np.arange(6)[None, :]
        np.testing.assert_array_equal(whole.shifted(-share).keep(i, j), whole.keep(i, j + share))
