"""The backward pass of the C++ core finds the very scores of the forward pass, however few the queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.numerics.dtypes import FLOATS, narrow, widen
from tests.backends.native.core import needs_native

LARGE = 1e5  # scores: in float32 the last bit of one is worth almost a hundredth of a weight
SIZES = [  # heads, key heads, queries, keys, dim
    (1, 1, 1, 300, 64),
    (4, 2, 3, 300, 33),
    (8, 1, 2, 70, 5),
    (4, 4, 4, 1100, 128),  # the keys are split
    (5, 5, 11, 90, 80),
    (2, 1, 37, 300, 64),  # not few
]


@needs_native
@pytest.mark.parametrize("options", [{}, {"softcap": 3 * LARGE}], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_key_that_takes_it_all_has_weight_one(size: tuple[int, ...], dtype: str, options: dict[str, Any]) -> None:
    heads, kv_heads, n_q, n_k, dim = size
    rng = np.random.default_rng(0)
    q = narrow(rng.standard_normal((1, heads, n_q, dim)) * LARGE**0.5, dtype)
    k = narrow(rng.standard_normal((1, kv_heads, n_k, dim)) * LARGE**0.5, dtype)
    # Each row of a key head has a column of its own in dout: dv is the weights themselves.
    rows = heads // kv_heads * n_q
    v = narrow(rng.standard_normal((1, kv_heads, n_k, rows)), dtype)
    dout = narrow(np.tile(np.eye(rows).reshape(1, -1, n_q, rows), (1, kv_heads, 1, 1)), dtype)
    out, lse = ft.attention(q, k, v, return_lse=True, backend="native", **options)
    weights = ft.attention_backward(dout, q, k, v, out, lse, backend="native", **options).dv
    np.testing.assert_array_equal(widen(weights, np.float64).max(axis=2), 1)
