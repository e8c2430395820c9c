"""The lesson's loop is the softmax for every tile size, and its example has the stated numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashtile.lab.lessons import online_softmax as lesson
from flashtile.lab.lessons.text import Say


@pytest.mark.parametrize("tile", [1, 3, 64, 1000])
def test_online_is_plain(tile: int) -> None:
    rng = np.random.default_rng(0)
    s, v = 30 * rng.standard_normal(100), rng.standard_normal((100, 3))
    weights = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    np.testing.assert_allclose(lesson.online(s, v, tile)[0], weights @ v, atol=1e-13)
    np.testing.assert_allclose(lesson.plain(s, v), weights @ v, atol=1e-13)


def test_the_example() -> None:
    lines: list[str] = []
    record = lesson.run(Say(lines.append), quick=True)
    first, second, *later = record["steps"]
    assert record["n"] == 2000 and len(record["steps"]) == 4
    assert (first["m"], second["m"]) == pytest.approx((2.1, 3.4)) and first["m_old"] is None
    assert second["factor"] == pytest.approx(math.exp(2.1 - 3.4)) and first["factor"] == 0
    assert all(step["factor"] == 1 and step["m"] == second["m"] for step in later)
    assert second["l"] == pytest.approx(second["factor"] * first["l"] + second["sum"])
    assert record["output"][0] == pytest.approx(later[-1]["o"] / later[-1]["l"])
    text = " ".join(lines)
    assert "4,000,000 scores: 8 MB" in text and "exp(2.1 - 3.4) = 0.27" in text
