"""Random problems by every function; a fixed part of them each time, hours of new ones where those are asked for."""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch")

from tests.fuzz.run import run, seeds


def test_random_problems() -> None:
    assert run(range(150)) == 150


@pytest.mark.slow
def test_random_problems_for_hours() -> None:
    """FLASHTILE_FUZZ_MINUTES says for how long; the seeds are new ones each time."""
    assert run(seeds(int(time.time()) * 1000, float(os.environ.get("FLASHTILE_FUZZ_MINUTES", "60"))))
