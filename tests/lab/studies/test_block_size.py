"""Study 3: B^2, N^2/B^2 and N^2, from the events of real runs."""

import pytest

from flashtile.backends import tiles
from flashtile.band import full
from flashtile.cost.traffic import fa2_elements
from flashtile.lab.studies import block_size
from tests.lab.studies.records import record, told


@pytest.fixture(scope="module")
def found():
    return record("block_size")


def test_block_memory_grows_as_b_squared(found):
    assert found.n == 512
    for b in found.blocks:
        assert b.formula == 2 * b.block**2
        assert b.sram == b.formula + 4 * b.block * 64 + 3 * b.block, "Q, K, V, O and m, l, factor"


def test_tiles_fall_as_n_squared_over_b_squared(found):
    for b in found.blocks:
        assert b.tiles == (-(-512 // b.block)) ** 2
    assert {b.block: b.tiles for b in found.blocks}[16] == 1024


def test_the_work_is_always_n_squared(found):
    assert {b.tile_elements for b in found.blocks} == {512**2} == {262_144}
    assert "0.26 M" in told("block_size")


def test_accuracy_is_the_same_for_all(found):
    assert all(0 < b.error < 1e-12 for b in found.blocks) and found.holds
    assert any(512 % b.block for b in found.blocks), "a ragged one is among them"


def test_traffic_is_the_closed_form(found):
    for b in found.blocks:
        assert b.moved == fa2_elements(512, 512, 64, 64, b.block, b.block, full())


def test_a_lost_tile_is_detected(monkeypatch):
    plain = tiles.schedule.FORWARD["fa2"]

    def lossy(band, grid):
        events = list(plain(band, grid))
        del events[4]  # Q, O, K, V, and then the first tile
        return iter(events)

    monkeypatch.setitem(tiles.schedule.FORWARD, "fa2", lossy)
    monkeypatch.setattr(block_size, "QUICK_BLOCKS", (128,))
    assert not block_size.compute(quick=True).holds
