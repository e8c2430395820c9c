"""Calls whose scores are large, exact, and often alike: their lse has no bits left for the logarithm of a sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashtile.numerics.dtypes import narrow
from tests.support.grid import Call, Case, Size, build
from tests.test_nonfinite import put


def large_scores(size: float, options: tuple[str, ...], dtype: str, shape: Size) -> Call:
    """Scores are small integers times `size`: weights are 0 or parts of a whole."""
    call = build(Case(shape, dtype, options))
    rng = np.random.default_rng(7)
    q, k = rng.integers(0, 2, call.q.shape), rng.integers(0, 2, call.k.shape) * size
    if "bias" in call.options:  # a gradient of it is asked for, not its help
        call = replace(call, options=call.options | {"bias": put(call.options["bias"], ..., 0.0)})
    return replace(call, q=narrow(q, dtype), k=narrow(k, dtype), options=call.options | {"scale": 1.0})
