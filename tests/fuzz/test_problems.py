"""Random problems by every entry point: fixed seeds by default, and hours of new ones on request."""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch")

from flashtile.backends import tiles
from tests.fuzz.entry_points import check, exact, with_numpy
from tests.fuzz.problems import problem
from tests.fuzz.run import run, seeds

# The rounding of D is most of the error of a gradient.
AMPLIFIED = (
    1795110961859,  # dropout of 0.9 in 16 bits
    1795110844056,
    1795110881410,  # dbias is a sum over all rows, of terms that cancel
    1795111151711,  # one visible key, in 32 bits
    1795111155810,  # dropout of 0.9, in 32 bits
)
NO_ERROR_BY_CHANCE = 1795111202151  # dbias is one number, and exact in float32 in the first order of columns


def test_random_problems() -> None:
    assert run(range(150)) == 150


def test_amplified_rounding_of_delta() -> None:
    assert run(AMPLIFIED) == len(AMPLIFIED)


def test_error_of_one_number() -> None:
    assert run([NO_ERROR_BY_CHANCE]) == 1


def test_wrong_delta_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """D is too large by a tenth. It has no effect in a quarter of the problems, such as those without keys."""
    delta, noticed = tiles._delta, 0
    monkeypatch.setattr(tiles, "_delta", lambda *given: delta(*given) * given[-1](1.1))
    for seed in range(60):
        p = problem(seed)
        try:
            check(p, with_numpy(p, backend="tiles"), exact(p))
        except AssertionError:
            noticed += 1
    assert noticed >= 40


@pytest.mark.slow
def test_random_problems_for_hours() -> None:
    """Runs for FLASHTILE_FUZZ_MINUTES, with new seeds each time."""
    assert run(seeds(int(time.time()) * 1000, float(os.environ.get("FLASHTILE_FUZZ_MINUTES", "60"))))
