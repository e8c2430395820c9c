"""Heads: their rows, the order of operations on scores, and products that exclude masked NaN."""

from __future__ import annotations

import numpy as np
import pytest

from flashtile.band import Band
from flashtile.numerics.head import guarded_product, heads
from flashtile.problem import describe
from tests.support.grid import Case, Size, build

rng = np.random.default_rng(0)


def test_heads_of_a_batch() -> None:
    q, k = np.zeros((2, 6, 4, 3)), np.zeros((2, 2, 5, 3))
    found = list(heads(describe(q, k, k, causal=True, kv_lengths=np.array([5, 2]))))
    assert [(h.sequence, h.head) for h in found] == [(s, h) for s in range(2) for h in range(6)]
    assert [h.kv_head for h in found[:6]] == [0, 0, 0, 1, 1, 1]
    assert [h.first_of_group for h in found[:6]] == [True, False, False, True, False, False]
    assert {(h.n_q, h.n_k) for h in found[:6]} == {(4, 5)} and {(h.n_q, h.n_k) for h in found[6:]} == {(4, 2)}
    assert found[0].band.offset == 1 and found[6].band.offset == -2


def test_views_of_a_batch_and_of_packed_sequences() -> None:
    call = build(Case(Size(2, 4, 2, 5, 7, 3, 2), "float64"))
    for h in heads(call.problem()):
        np.testing.assert_array_equal(h.queries(call.problem().q), call.q[h.sequence, h.head])
        np.testing.assert_array_equal(h.keys(call.problem().v), call.v[h.sequence, h.head // 2])
    call = build(Case(Size.packed(4, 2, 3, 2, (2, 3), (0, 1), (4, 2)), "float64"))
    q0, k0 = (0, 2, 2), (0, 3, 4)
    for h in heads(call.problem()):
        n_q, n_k = ((2, 3), (0, 1), (4, 2))[h.sequence]
        assert (h.n_q, h.n_k) == (n_q, n_k)
        start = q0[h.sequence]
        np.testing.assert_array_equal(h.queries(call.problem().q), call.q[start : start + n_q, h.head])
        start = k0[h.sequence]
        np.testing.assert_array_equal(h.keys(call.problem().k), call.k[start : start + n_k, h.head // 2])


def test_views_share_memory() -> None:
    problem = build(Case(Size(1, 2, 1, 5, 7, 3, 2), "float64")).problem()
    out = np.zeros(problem.out_shape())
    for h in heads(problem):
        h.queries(out)[...] = h.head + 1
    assert (out[0, 0] == 1).all() and (out[0, 1] == 2).all()


def test_order_of_operations() -> None:
    """scale, softcap, + bias, + alibi, mask."""
    q, k = rng.standard_normal((1, 2, 4, 3)), rng.standard_normal((1, 2, 6, 3))
    bias, alibi = rng.standard_normal((1, 2, 4, 6)), np.array([0.5, 0.25])
    mask = rng.random((1, 2, 4, 6)) < 0.5
    problem = describe(q, k, k, scale=3.0, softcap=0.7, bias=bias, alibi=alibi, mask=mask, causal=True)
    i, j = np.arange(4)[:, None], np.arange(6)
    for h in heads(problem):
        n = h.head
        expected = 0.7 * np.tanh(3.0 * q[0, n] @ k[0, n].T / 0.7) + bias[0, n] - alibi[n] * np.abs(i + 2 - j)
        seen = mask[0, n] & (j <= i + 2)
        scores = h.scores(q[0, n], k[0, n], slice(0, 4), slice(0, 6), masked=True)
        np.testing.assert_allclose(scores.S, np.where(seen, expected, -np.inf))
        np.testing.assert_array_equal(scores.visible, seen)
        np.testing.assert_allclose(
            scores.slope, np.where(seen, 1 - np.tanh(3.0 * q[0, n] @ k[0, n].T / 0.7) ** 2, 0), atol=1e-15
        )
        tile = h.scores(q[0, n][1:3], k[0, n][2:5], slice(1, 3), slice(2, 5), masked=True)
        np.testing.assert_allclose(tile.S, scores.S[1:3, 2:5])
        picked = h.scores(q[0, n][[3, 0]], k[0, n], np.array([3, 0]), slice(0, 6), masked=True)
        np.testing.assert_allclose(picked.S, scores.S[[3, 0]])


def test_a_full_tile_is_not_masked() -> None:
    problem = describe(*(np.zeros((4, 3)),) * 3, band=Band(0, 0))
    (h,) = heads(problem)
    scores = h.scores(np.zeros((4, 3)), np.zeros((4, 3)), slice(0, 4), slice(0, 4), masked=False)
    assert scores.visible is None and np.isfinite(scores.S).all()


@pytest.mark.parametrize("axes", list(np.ndindex(2, 2, 2, 2)), ids=str)
def test_pairs_and_add_pairs(axes: tuple[int, ...]) -> None:
    """add_pairs is the transpose of pairs: it sums where pairs broadcasts."""
    whole = (2, 4, 5, 7)
    shape = tuple(n if a else 1 for n, a in zip(whole, axes, strict=True))
    q, k = np.zeros((2, 4, 5, 3)), np.zeros((2, 2, 7, 3))
    x, dS = rng.standard_normal(shape), rng.standard_normal(whole)
    total = np.zeros(shape)
    for h in heads(describe(q, k, k, bias=x)):
        for rows in (slice(0, 3), slice(3, 5)):
            for cols in (slice(0, 4), slice(4, 7)):
                expected = np.broadcast_to(x, whole)[h.sequence, h.head, rows, cols]
                np.testing.assert_array_equal(np.broadcast_to(h.pairs(x, rows, cols), expected.shape), expected)
                h.add_pairs(total, dS[h.sequence, h.head, rows, cols], rows, cols)
    summed = dS.sum(axis=tuple(n for n in range(4) if not axes[n]), keepdims=True)
    np.testing.assert_allclose(total, summed)


def test_guarded_product_is_the_product() -> None:
    A, B = rng.standard_normal((5, 6)), rng.standard_normal((6, 3))
    np.testing.assert_array_equal(guarded_product(A, B, None), A @ B)
    np.testing.assert_array_equal(guarded_product(A, B, np.ones((5, 6), bool)), A @ B)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_guarded_product_skips_masked_pairs(bad: float) -> None:
    A, B = rng.standard_normal((5, 6)), rng.standard_normal((6, 3))
    visible = rng.random((5, 6)) < 0.5
    visible[0, 2], visible[1, 2] = True, False
    A[~visible] = 0
    B[2] = 0
    clean = A @ B
    B[2, 1] = bad
    found = guarded_product(A, B, visible)
    np.testing.assert_array_equal(found[~visible[:, 2]], clean[~visible[:, 2]])
    assert not np.isfinite(found[visible[:, 2], 1]).any()
    np.testing.assert_allclose(found[visible[:, 2]][:, [0, 2]], clean[visible[:, 2]][:, [0, 2]])


def test_kept_has_the_factors_of_dropout() -> None:
    q = np.zeros((2, 2, 6, 3))
    found = {}
    for h in heads(describe(q, q, q, dropout=0.25, seed=3)):
        whole = h.kept(slice(0, 6), slice(0, 6), np.float64)
        assert set(np.unique(whole)) <= {0, 1 / 0.75}
        np.testing.assert_array_equal(h.kept(slice(2, 5), slice(1, 6), np.float64), whole[2:5, 1:6])
        found[h.sequence, h.head] = whole.tobytes()
    assert len(set(found.values())) == 4, "every head of every sequence drops other weights"
    (h,) = heads(describe(q[0, 0], q[0, 0], q[0, 0]))
    assert h.kept(slice(0, 6), slice(0, 6), np.float64) is None
