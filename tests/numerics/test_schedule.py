"""Schedules: every visible pair is computed once, every output block is stored; properties of each order."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from flashtile.band import FAR, Band, Kind
from flashtile.numerics.schedule import (
    FORWARD,
    Event,
    Grid,
    Load,
    Store,
    Tile,
    Zero,
    backward,
    fa1_forward,
    fa2_forward,
)

BANDS = [
    Band(),
    Band(right=0),
    Band(right=0, offset=-5),
    Band(right=0, offset=7),
    Band(3, 2),
    Band(0, 0, 1),
    Band(-2, 6, 0),
    Band(9, -3, 2),
    Band(-5, 3),
    Band(FAR, FAR, -FAR),
]
GRIDS = [Grid(*g) for g in itertools.product((1, 7, 16), (1, 9, 16), (1, 4, 16), (1, 3, 16))]
GRIDS += [Grid(0, 5, 4, 4), Grid(5, 0, 4, 4), Grid(0, 0, 4, 4)]
each_band = pytest.mark.parametrize("band", BANDS, ids=str)
STREAMS = {**FORWARD, "backward": backward}


def visible(band: Band, grid: Grid) -> np.ndarray:
    return band.keep(np.arange(grid.n_q)[:, None], np.arange(grid.n_k)[None, :])


def tiles(events: list[Event]) -> list[Tile]:
    return [e for e in events if isinstance(e, Tile)]


@each_band
@pytest.mark.parametrize("order", STREAMS)
def test_every_visible_pair_exactly_once(order: str, band: Band) -> None:
    for grid in GRIDS:
        seen = visible(band, grid)
        times = np.zeros(seen.shape, int)
        for tile in tiles(list(STREAMS[order](band, grid))):
            at = grid.rows(tile.i), grid.cols(tile.j)
            times[at] += 1
            if tile.kind is Kind.FULL:
                assert seen[at].all(), (grid, tile)
                assert tile.kind is not Kind.SKIPPED
        assert (times[seen] == 1).all() and times.max(initial=0) <= 1, grid


@each_band
@pytest.mark.parametrize("order", STREAMS)
def test_blocks_are_loaded_before_they_are_used(order: str, band: Band) -> None:
    """The blocks of each tile and of each store are in SRAM."""
    needs = {"fa1": "Q K V m l O", "fa2": "Q K V O", "backward": "Q K V dO L D dQ dK dV"}[order].split()
    for grid in GRIDS:
        sram: dict[str, int] = {}
        for event in STREAMS[order](band, grid):
            match event:
                case Load(name, n) | Zero(name, n):
                    sram[name] = n
                case Tile(i, j, _):
                    for name in needs:
                        assert sram[name] == (j if name in ("K", "V", "dK", "dV") else i), (grid, event, name)
                case Store(name, n):
                    assert sram["O" if name == "L" else name] == n, (grid, event)


@each_band
def test_fa2_stores_each_block_once(band: Band) -> None:
    for grid in GRIDS:
        events = list(fa2_forward(band, grid))
        once = {Store(name, i): 1 for i in range(grid.shape[0]) for name in "OL"}
        assert Counter(e for e in events if isinstance(e, Store)) == once, grid
        assert Counter(e for e in events if isinstance(e, Load) and e.name == "Q") == {
            Load("Q", i): 1 for i in range(grid.shape[0])
        }
        assert all(a.i <= b.i for a, b in itertools.pairwise(tiles(events))), "row by row"


@each_band
def test_fa1_loads_each_key_block_at_most_once(band: Band) -> None:
    for grid in GRIDS:
        events = list(fa1_forward(band, grid))
        loads = Counter(e for e in events if isinstance(e, Load))
        met = {tile.j for tile in tiles(events)}
        assert {e.n for e in loads if e.name == "K"} == met and {e.n for e in loads if e.name == "V"} == met
        assert all(loads[Load(name, j)] == 1 for name in "KV" for j in met)
        assert all(a.j <= b.j for a, b in itertools.pairwise(tiles(events))), "column by column"
        stores = Counter(e for e in events if isinstance(e, Store))
        for i in range(grid.shape[0]):
            visits = sum(tile.i == i for tile in tiles(events))
            assert all(stores[Store(name, i)] == visits for name in ("O", "m", "l")), (grid, i)


@each_band
@pytest.mark.parametrize("first_of_group", [True, False])
def test_backward_writes_every_gradient(first_of_group: bool, band: Band) -> None:
    for grid in GRIDS:
        events = list(backward(band, grid, first_of_group))
        stores = Counter(e for e in events if isinstance(e, Store))
        for j in range(grid.shape[1]):
            assert stores[Store("dK", j)] == stores[Store("dV", j)] == 1, (grid, j)
        for i in range(grid.shape[0]):
            assert stores[Store("dQ", i)] >= 1, (grid, i)
        starts = {type(e) for e in events if isinstance(e, Load | Zero) and e.name in ("dK", "dV")}
        assert starts <= {Zero if first_of_group else Load}
        # dQ starts from zero the first time, and is loaded every later time.
        started: set[int] = set()
        for e in events:
            if isinstance(e, Zero) and e.name == "dQ":
                assert e.n not in started
                started.add(e.n)
            elif isinstance(e, Load) and e.name == "dQ":
                assert e.n in started


def test_blocks_of_a_grid_cover_it() -> None:
    for grid in GRIDS:
        rows = [n for i in range(grid.shape[0]) for n in range(*grid.rows(i).indices(grid.n_q))]
        cols = [n for j in range(grid.shape[1]) for n in range(*grid.cols(j).indices(grid.n_k))]
        assert rows == list(range(grid.n_q)) and cols == list(range(grid.n_k))
        for name in ("K", "V", "dK", "dV"):
            assert grid.shape[1] == 0 or grid.block(name, 0) == grid.cols(0)
        for name in ("Q", "O", "L", "m", "l", "dQ", "dO", "D"):
            assert grid.shape[0] == 0 or grid.block(name, 0) == grid.rows(0)


@pytest.mark.parametrize("order", STREAMS)
def test_causal_skips_about_half(order: str) -> None:
    grid = Grid(64, 64, 4, 4)
    assert len(tiles(list(STREAMS[order](Band(), grid)))) == 256
    assert len(tiles(list(STREAMS[order](Band(right=0), grid)))) == 16 * 17 // 2
    assert sum(t.kind is Kind.PARTIAL for t in tiles(list(STREAMS[order](Band(right=0), grid)))) == 16
