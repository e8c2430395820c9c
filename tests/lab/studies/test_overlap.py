"""overlap.py: by published rates, exponentials matter more on newer GPUs."""

from itertools import pairwise

import pytest

from flashtile.lab.studies import overlap


def test_newer_gpus_gain_more_from_overlap():
    record = overlap.compute()
    saved = [tile.saved for tile in record.tiles]
    assert saved == sorted(saved) and saved[0] == pytest.approx(0.2, abs=0.01)
    h100 = record.of("h100")
    assert h100.products == pytest.approx(4 * 128**3 / (989.4e12 / 132)) and h100.saved == pytest.approx(
        1 / 3, abs=0.01
    )
    assert f"saves at most {saved[0]:.0%}" in overlap.findings(record)[1]


def test_overlapped_spans_do_not_share_a_unit():
    pytest.importorskip("matplotlib")
    record = overlap.compute()
    for ax in overlap.draw(record).axes:
        for lane in (0, 1):
            bars = sorted((bar.get_x(), bar.get_width()) for bar in ax.patches if round(bar.get_y() + 0.31) == lane)
            assert len(bars) == 4
            assert all(a + wide <= b + 1e-12 for (a, wide), (b, _) in pairwise(bars))
