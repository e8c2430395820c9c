"""Random problems by every entry point: fixed seeds by default, and hours of new ones on request."""

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
    """Runs for FLASHTILE_FUZZ_MINUTES, with new seeds each time."""
    assert run(seeds(int(time.time()) * 1000, float(os.environ.get("FLASHTILE_FUZZ_MINUTES", "60"))))
