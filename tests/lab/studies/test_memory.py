"""Study 2: the expected figures from the computed record, and a leak is detected."""

import numpy as np
import pytest

from flashtile.backends import tiles
from flashtile.lab.studies import memory
from tests.lab.studies.records import record, told


@pytest.fixture(scope="module")
def found():
    return record("memory")


@pytest.fixture(scope="module")
def at(found):
    return {p.n: p for p in found.predicted}


KIB, MIB = 1 << 10, 1 << 20


def test_standard_by_the_formula(at):
    assert at[1024].standard == 4 * (2 * 1024**2 + 1024 * 64) == 8.25 * MIB


def test_tiled_by_the_formula(at, found):
    """280 KB and 241x if a statistic counts as two floats, 272 KiB if it counts as one."""
    assert (found.d, found.block) == (64, 32)
    assert at[1024].tiled == 4 * (2 * 32**2 + 2 * 1024 + 1024 * 64) == 272 * KIB
    assert at[1024].tiled_wide == 280 * KIB
    assert round(at[8192].saved) == 248
    assert round(at[8192].saved_wide) == 241


def test_blocks_take_8_kib_for_every_n(found):
    assert {p.blocks for p in found.predicted} == {8 * KIB}
    assert len(found.predicted) >= 6


def test_measured_standard_is_the_formula(at, found):
    assert [m.n for m in found.measured] == [256, 512, 1024]
    for m in found.measured:
        assert at[m.n].standard <= m.standard <= at[m.n].standard + 16 * m.n, "and a few numbers a row"


def test_measured_tiles_need_the_same_for_every_n(found):
    assert found.holds
    for m in found.measured:
        assert m.results == 4 * m.n * (64 + 1)
        # S and P of this tile and the last; O four times; m, l, factor and the like.
        assert m.blocks == found.measured[0].blocks <= 4 * (4 * 32 * 32 + 4 * 32 * 64 + 8 * 32)
    assert found.measured[-1].saved > 25


def test_savings_by_dtype(found):
    by_dtype = {m.dtype: m for m in found.dtypes}
    assert list(by_dtype) == ["float16", "float32", "float64"]
    half, single, double = by_dtype.values()
    assert 1.9 < single.standard / half.standard < 2.1 and 1.9 < double.standard / single.standard < 2.1
    assert half.saved < single.saved
    assert single.saved == pytest.approx(double.saved, rel=0.01)


def test_process_growth_matches_the_arrays(found):
    if any(g.standard is None for g in found.grown):
        pytest.skip("the system cannot tell")
    (grown,) = found.grown
    assert grown.standard > 2 * 4 * grown.n**2, "at least S and P"
    assert grown.flashtile < grown.standard / 8


def test_the_figures_are_in_the_findings():
    text = told("memory")
    for figure in ("8.25 MiB", "280 KiB", "272 KiB", "241x", "248x", "8 KiB"):
        assert figure in text


def test_frugal_attention_is_attention():
    q, k, v = memory.qkv(50, 8)
    problem = memory.describe(q, k, v)
    np.testing.assert_allclose(memory.frugal_attention(q, k, v), tiles.forward(problem)[0][0, 0], atol=1e-13)


def test_a_leak_is_detected(monkeypatch, found):
    plain, kept = tiles.Forward.tile, []

    def leaking(self, at):
        plain(self, at)
        kept.append(self.sram["P"])

    monkeypatch.setattr(tiles.Forward, "tile", leaking)
    rows = tuple(memory._measure(n, "float32") for n in (256, 512))
    assert rows[1].blocks > 2 * rows[0].blocks
    assert not memory.Memory(64, 32, found.predicted, rows, (), ()).holds
