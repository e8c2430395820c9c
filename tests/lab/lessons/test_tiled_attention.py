"""Forty lines of NumPy against the oracle: ragged lengths, any block, causal, and torch instead of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import flashtile
from flashtile.lab.lessons import tiled_attention as lesson
from flashtile.lab.lessons.text import Say


def inputs(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    return [rng.standard_normal((n, 8)) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, block", [(1, 4), (16, 4), (17, 4), (19, 5), (12, 100)])
def test_both_are_the_oracle(n: int, block: int, causal: bool) -> None:
    q, k, v = inputs(n)
    oracle = flashtile.standard_attention(q, k, v, causal=causal)
    np.testing.assert_allclose(lesson.tiled(q, k, v, block, causal), oracle, atol=1e-13)
    np.testing.assert_allclose(lesson.standard(q, k, v, causal), oracle, atol=1e-13)


def test_with_torch() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = inputs(19)
    out = lesson.tiled(*map(torch.from_numpy, (q, k, v)), 5, True, xp=torch)
    np.testing.assert_allclose(out.numpy(), flashtile.standard_attention(q, k, v, causal=True), atol=1e-13)


def test_memory_is_the_peak() -> None:
    one = 1 << 20

    def call() -> None:
        x = np.zeros(one, np.uint8)
        del x
        y = np.zeros(2 * one, np.uint8)
        del y

    assert lesson.peak(call) == pytest.approx(2 * one, rel=0.02)


def test_the_record() -> None:
    record = lesson.run(Say(lambda line: None), quick=True)
    for row in record["memory"]:
        assert row["standard"] > 2 * row["matrix"] and row["output"] < row["tiled"]
    first, *_, last = record["memory"]
    assert last["standard"] / first["standard"] > 15 and last["tiled"] / first["tiled"] < 2


def test_numpy_is_timed_separately(together: list[set[str]]) -> None:
    """Its BLAS keeps cores spinning, so ours is timed before it, never in turns with it."""
    lesson.run(Say(lambda line: None), quick=True)
    assert together[:2] == [{"flashtile"}, {"flashtile, causal"}] and max(map(len, together)) == 1
