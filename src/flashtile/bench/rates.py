"""What this machine can do at best, measured in a moment: a large matrix product and a large copy."""

from __future__ import annotations

import numpy as np

from flashtile.bench.timing import alternate
from flashtile.plan import Rates


def measure(seconds: float = 0.4) -> Rates:
    """float32 FLOPs and bytes a second, the best of a few tries."""
    n = 1024
    a, b = (np.full((n, n), 0.5, np.float32) for _ in range(2))
    product = np.empty_like(a)
    source = np.zeros(1 << 24, np.float32)  # far more than a cache holds
    copy = np.empty_like(source)
    times = alternate(
        {"product": lambda: np.matmul(a, b, out=product), "copy": lambda: np.copyto(copy, source)}, seconds=seconds
    )
    fastest = {name: min(timing.samples) for name, timing in times.items()}
    return Rates(2 * n**3 / fastest["product"], 2 * source.nbytes / fastest["copy"])
