"""Run random problems, a number of them or for some minutes, by all entry points and backends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from tests.fuzz.entry_points import ENTRY_POINTS, check, exact
from tests.fuzz.problems import problem
from tests.support.runners import why_missing

BACKENDS = [name for name in ("auto", "native", "tiles") if name == "auto" or why_missing(name) is None]


def seeds(first: int, minutes: float) -> Iterator[int]:
    """Yield seeds from `first` on until the time is up."""
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        yield first
        first += 1


def run(numbers: Iterable[int]) -> int:
    """Run problems by their seeds and return their number. A failure names its seed."""
    done = 0
    for seed in numbers:
        p, rng = problem(seed), np.random.default_rng([seed, 1])
        wanted = exact(p)
        for name, function in ENTRY_POINTS.items():
            more = {"backend": str(rng.choice(BACKENDS)), "threads": int(rng.integers(1, 4))}
            try:
                check(p, function(p, **more), wanted)
            except Exception as error:
                raise AssertionError(f"seed {seed}, by {name} {more}: {p}") from error
        done += 1
    return done
