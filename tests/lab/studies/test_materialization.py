"""Study 7: the largest intermediate does not grow; and tracking would detect an N x N one."""

import numpy as np
import pytest

from flashtile.backends import tiles
from flashtile.lab.studies import materialization
from flashtile.lab.studies.materialization import CAUSAL, FA1, FA2, STANDARD
from tests.lab.studies.records import record, told


@pytest.fixture(scope="module")
def found():
    return record("materialization", quick=False)


def test_the_largest_intermediate_stays_1024_elements(found):
    assert found.block == found.d == 32
    for way in (FA2, CAUSAL):
        assert [w.n for w in found.ways[way]] == [64, 128, 256, 512, 1024, 2048]
        assert {w.largest for w in found.ways[way]} == {1024}
    last = found.ways[FA2][-1]
    assert last.n == 2048 and last.smaller == 4096
    assert last.arrays == sum(count for _, count in last.sizes) > 100_000
    text = told("materialization", quick=False)
    assert "1,024 elements" in text and "4,096x" in text


def test_standard_attention_is_detected(found):
    assert [w.largest for w in found.ways[STANDARD]] == [n * n for n in (64, 128, 256, 512, 1024, 2048)]
    assert found.caught and found.holds


def test_fa1_keeps_one_number_per_row(found):
    assert [w.largest for w in found.ways[FA1]] == [1024, 1024, 1024, 1024, 1024, 2048]


@pytest.mark.parametrize(
    "sneak",
    [
        lambda n: np.zeros((n, n)),
        lambda n: np.ones((n, n), bool),
        lambda n: (np.arange(n)[:, None] - np.arange(n)).sum(),
        lambda n: np.exp(np.zeros((n, 1)) + np.zeros(n)).max(),
    ],
    ids=["float64", "bool", "int64, a temporary", "a temporary in an expression"],
)
def test_a_short_lived_array_is_detected(monkeypatch, sneak, found):
    plain = tiles.Forward.tile

    def sneaking(self, at):
        if at.i == at.j == 3:
            sneak(self.grid.n_q)
        plain(self, at)

    monkeypatch.setattr(tiles.Forward, "tile", sneaking)
    n = 256
    seen = materialization._track(lambda problem: tiles.forward(problem, "fa2", 32, 32), n, causal=False)
    assert seen.largest >= n * n / 8 > 1024
    assert not materialization.Materialization(32, 32, found.ways | {FA2: (seen,)}).holds


def test_failed_detection_does_not_hold(found):
    blind = materialization.Tracked(64, 10, 1024, ((1024, 10),))
    assert not materialization.Materialization(32, 32, found.ways | {STANDARD: (blind,)}).holds
