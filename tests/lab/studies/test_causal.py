"""Study 5: causal tiles match the reference, and about half are skipped."""

import numpy as np
import pytest

from flashtile.lab.studies import comparison
from tests.lab.studies.records import record


@pytest.fixture(scope="module")
def found():
    return record("causal")


def test_it_matches_for_divisible_ragged_and_unequal_blocks(found):
    shapes = found.comparisons
    assert any(not c.ragged for c in shapes) and sum(c.ragged for c in shapes) >= 3
    assert sum(c.br != c.bc for c in shapes) >= 2 and any(c.ragged and c.br != c.bc for c in shapes)
    assert any(c.n_q != c.n_k for c in shapes)
    for c in shapes:
        assert set(c.errors) == {"fa1", "fa2", "attention()"} and 0 < c.worst < 1e-12
    assert found.holds


def test_skipped_tiles_are_those_without_a_visible_pair(found):
    for c in found.comparisons:
        i, j = np.arange(c.n_q)[:, None] + c.n_k - c.n_q, np.arange(c.n_k)
        seen = j <= i
        blocks = [seen[r : r + c.br, s : s + c.bc].any() for r in range(0, c.n_q, c.br) for s in range(0, c.n_k, c.bc)]
        assert (c.computed, c.skipped) == (sum(blocks), len(blocks) - sum(blocks))


def test_about_half_is_skipped(found):
    for c in found.counted:
        assert c.skipped == c.side * (c.side - 1) // 2 == c.full and c.partial == c.side
    assert 0.49 < found.counted[-1].skipped_share < 0.5
    shares = [c.skipped_share for c in found.comparisons if c.n_q == c.n_k]
    assert all(0.35 < share < 0.5 for share in shares)


def test_a_wrong_mask_is_detected():
    right = comparison.compare(40, 40, 8, 16, 16, causal=True)
    wrong = comparison.outputs(*comparison.samples((40, 8), (40, 8), (40, 8)), 16, 16)[0]["fa2"]
    exact = comparison.flashtile.standard_attention(*comparison.samples((40, 8), (40, 8), (40, 8)), causal=True)
    assert right.worst < 1e-12 < comparison.largest(wrong - exact)


def test_the_drawn_tiles(found):
    n, br, bc = found.drawn
    assert br != bc and len(found.kinds) == n // br and {len(row) for row in found.kinds} == {n // bc}
    assert {kind for row in found.kinds for kind in row} == {"skipped", "partial", "full"}
