"""cli/picture.py: pictures are to scale and show the band."""

import pytest

pytest.importorskip("rich")

from flashtile import masks
from flashtile.band import Band
from flashtile.lab.cli.picture import CELL, HIDDEN, SEEN, SHADES, SIDE, TILE, legend, pictures, side_by_side
from flashtile.numerics.visibility import Visibility

CAUSAL = Band(right=0)


def cells(picture):
    """One character per cell."""
    assert all(line[::2] == line[1::2] for line in picture.lines)
    return [line[::2] for line in picture.lines]


def test_each_step_is_one_cell_of_the_one_before():
    found = pictures(CAUSAL, 131072, 131072, (128, 128))
    assert [(p.queries, p.keys) for p in found] == [(131072, 131072), (13108, 13108), (1311, 1311)]
    assert [cells(p)[-1][-1] for p in found] == [CELL, CELL, TILE]
    assert all(len(cells(p)) == SIDE and len(cells(p)[0]) == SIDE for p in found)


@pytest.mark.parametrize("n", [300, 1000, 4096, 100_000])
@pytest.mark.parametrize("tile", [(128, 128), (48, 192), (16, 64)])
def test_the_tile_is_to_scale(n, tile):
    last = pictures(Band(), n, n, tile)[-1]
    drawn = cells(last)
    cell = last.keys / SIDE
    high = sum(TILE in line for line in drawn)
    wide = drawn[-1].count(TILE)
    assert high == max(1, min(SIDE, round(min(tile[0], n) / cell)))
    assert wide == max(1, min(SIDE, round(min(tile[1], n) / cell)))
    assert wide * cell == pytest.approx(min(tile[1], last.keys), rel=0.5)


def test_the_band_is_drawn_as_it_is():
    """A cell is drawn as visible if any of its pairs is."""
    band, n = Band(left=3, right=1), 20
    (picture,) = pictures(band, n, n, (20, 20))
    (first, *_) = pictures(band, 1000, 1000, (1, 1))
    assert cells(picture) == [TILE * SIDE] * SIDE
    wide = pictures(Band(left=199, right=0), 1000, 1000, (1, 1))[0]
    for i, line in enumerate(cells(wide)):
        for j, c in enumerate(line):
            seen = any(-199 <= y - x <= 0 for x in (100 * i, 100 * i + 99) for y in range(100 * j, 100 * j + 100))
            assert c == (CELL if i == j == SIDE - 1 else SEEN if seen else HIDDEN)
    assert cells(first)[0] == SEEN * 2 + HIDDEN * 8


def test_spans_are_drawn_as_they_are():
    """Documents of 200 and 300 tokens, and a sink with a window, whose two spans leave a gap."""
    spans = masks.documents(lengths=[200, 300, 500])
    drawn = cells(pictures(Visibility(Band(), spans.limits[0, 0]), 1000, 1000, (1, 1))[0])
    assert drawn[:2] == [SEEN * 2 + HIDDEN * 8] * 2 and drawn[2:5] == [HIDDEN * 2 + SEEN * 3 + HIDDEN * 5] * 3
    spans = masks.sink_window(left=99, sinks=10, n_q=1000)
    drawn = cells(pictures(Visibility(Band(), spans.limits[0, 0]), 1000, 1000, (1, 1))[0])
    assert drawn[6] == SEEN + HIDDEN * 4 + SEEN * 2 + HIDDEN * 3


def test_one_query_is_a_strip():
    found = pictures(Band(right=0, offset=4095), 1, 4096, (4, 64))
    assert [len(p.lines) for p in found] == [1, 1] and [p.keys for p in found] == [4096, 410]


def test_empty_shapes():
    assert pictures(Band(), 0, 0, (128, 128)) and pictures(Band(), 0, 7, (128, 128)) and pictures(Band(), 7, 0, (1, 1))


def test_side_by_side_within_80_columns():
    found = pictures(CAUSAL, 1 << 20, 1 << 20, (64, 64))
    assert len(found) == 4 + 1
    for shades in (True, False):
        text = side_by_side(found, shades)
        assert max(map(len, text.splitlines())) <= 80
        assert all(f"{p.queries} x {p.keys}" in text for p in found)
        assert text.isascii() != shades and legend(found, shades).isascii() != shades
        assert len(legend(found, shades)) <= 80
    assert legend(pictures(Band(), 8, 8, (8, 8)), True) == f"{SHADES[TILE]} one tile"
