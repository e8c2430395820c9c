"""Study 1: the computed record meets its limits, and an error is detected."""

import numpy as np
import pytest

from flashtile.lab.studies import comparison, equivalence
from tests.lab.studies.records import record


@pytest.fixture(scope="module")
def found():
    return record("equivalence")


def test_shapes(found):
    shapes = found.comparisons
    assert len(shapes) >= 8 and max(c.n_q for c in shapes) == 1024
    assert len({(c.br, c.bc) for c in shapes}) >= 5
    assert sum(c.ragged for c in shapes) >= 3 and any(c.br != c.bc for c in shapes)


def test_every_error_is_below_1e_10_and_none_is_missing(found):
    for c in (*found.comparisons, *found.blocks):
        assert set(c.errors) == {"fa1", "fa2", "attention()"}
        assert all(0 < error < 1e-10 for error in c.errors.values()), c
    assert found.holds and found.worst < 1e-12


def test_block_sizes_of_256_by_64(found):
    assert {(c.n_q, c.n_k, c.d) for c in found.blocks} == {(256, 256, 64)}
    assert {16, 32, 64, 100, 128, 256} <= {c.br for c in found.blocks}


def test_online_softmax_by_chunk(found):
    assert [c.chunk for c in found.chunks] == [1, 3, 10, 32, 100, 333, 1000]
    assert all(c.error < 1e-13 for c in found.chunks)


def test_scores_of_plus_and_minus_1000(found):
    assert {e.highest for e in found.extremes} == {1000, -1000} and {e.lowest for e in found.extremes} == {1000, -1000}
    for e in found.extremes:
        assert e.naive_finite == 0 and e.finite == 1 and e.error < 1e-12


def test_rounding_is_no_worse_than_twice_the_standard(found):
    assert [r.dtype for r in found.dtypes] == ["float16", "bfloat16", "float32", "float64"]
    for r in found.dtypes[:3]:
        assert 0 < r.tiled <= 2 * r.standard


@pytest.mark.parametrize("off, holds", [(1e-9, False), (0.0, True)])
def test_an_error_is_detected(monkeypatch, off, holds):
    plain = comparison.tiles.forward

    def wrong(*arguments):
        out, lse = plain(*arguments)
        return np.add(out, off), lse

    monkeypatch.setattr(comparison.tiles, "forward", wrong)
    assert (comparison.compare(32, 32, 8, 16, 16).worst < equivalence.LIMIT) is holds
