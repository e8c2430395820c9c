"""Calls with large, exact and often equal scores: their lse has no bits left for the logarithm of the sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashtile.numerics.dtypes import narrow
from tests.support.grid import Call, Case, Size, build
from tests.test_nonfinite import put


def large_scores(size: float, options: tuple[str, ...], dtype: str, shape: Size) -> Call:
    """Build a call whose scores are small integers times `size`, so each weight is 0 or 1/n."""
    call = build(Case(shape, dtype, options))
    rng = np.random.default_rng(7)
    q, k = rng.integers(0, 2, call.q.shape), rng.integers(0, 2, call.k.shape) * size
    if "bias" in call.options:  # it must not change the scores; only its gradient is tested
        call = replace(call, options=call.options | {"bias": put(call.options["bias"], ..., 0.0)})
    return replace(call, q=narrow(q, dtype), k=narrow(k, dtype), options=call.options | {"scale": 1.0})
