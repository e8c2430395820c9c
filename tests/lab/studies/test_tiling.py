"""Study 4: sixteen tokens in tiles of four."""

import numpy as np
import pytest

from flashtile.lab.studies.study import qkv
from flashtile.numerics.softmax import OnlineSoftmax
from tests.lab.studies.records import record, told


@pytest.fixture(scope="module")
def found():
    return record("tiling")


def test_processing_order(found):
    assert (found.n, found.block) == (16, 4)
    order = np.arange(1, 17).reshape(4, 4)
    assert found.orders["fa2"] == tuple(map(tuple, order))
    assert found.orders["fa1"] == tuple(map(tuple, order.T))


def test_first_four_tiles(found):
    q, k, _ = qkv(16, found.d)
    S = q[:4] @ k.T * found.d**-0.5
    state = OnlineSoftmax.empty(4, 0, np.float64)
    assert [(step.i, step.j) for step in found.first] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    for step in found.first:
        scores = S[:, 4 * step.j : 4 * step.j + 4]
        P, factor = state.absorb(scores)
        for mine, theirs in (
            (step.S, scores),
            (step.P, P),
            (step.m, state.m),
            (step.l, state.l),
            (step.factor, factor),
        ):
            np.testing.assert_allclose(mine, theirs, atol=1e-14)


def test_real_weights(found):
    q, k, _ = qkv(16, found.d)
    e = np.exp(q @ k.T * found.d**-0.5)
    np.testing.assert_allclose(found.weights, e / e.sum(axis=1, keepdims=True), atol=1e-14)


def test_causal_skips_six_and_processes_ten(found):
    assert (found.skipped, found.processed) == (6, 10)
    for i, row in enumerate(found.causal):
        assert row == ("full",) * i + ("partial",) + ("skipped",) * (3 - i)
    assert found.causal_order == ((1, 0, 0, 0), (2, 3, 0, 0), (4, 5, 6, 0), (7, 8, 9, 10)), "as it ran"
    assert "6 tiles are skipped, 10 are processed" in told("tiling")


def test_it_is_attention(found):
    assert found.error < 1e-13 and found.holds
