"""Both orders: the number of writes, the traffic, and the numbers exchanged between warps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashtile.cost import traffic
from flashtile.lab.lessons import fa1_vs_fa2 as lesson
from flashtile.lab.lessons.text import Say


@pytest.fixture(scope="module")
def record() -> Any:
    return lesson.run(Say(lambda line: None), quick=True)


def test_writes_are_scattered_or_sequential(record: Any) -> None:
    assert record["written"] == {"fa1": [0, 1, 2, 3] * 4, "fa2": [0, 1, 2, 3]}


def test_the_bytes_are_those_of_the_closed_forms(record: Any) -> None:
    moved, n, d, block = record["moved"], record["moved"]["n"], lesson.DIM, record["moved"]["block"]
    columns = n // block
    fa1, fa2 = moved["fa1"], moved["fa2"]
    elements = traffic.fa1_elements(n, d, block)
    statistics = columns * 4 * n  # m and l, there and back, in 32 bits
    assert fa1["read"] + fa1["written"] == 2 * (elements - statistics) + 4 * statistics
    assert fa1["written"] == columns * (2 * n * d + 2 * 4 * n) and fa2["written"] == 2 * n * d + 4 * n
    assert (fa1["writes_of_a_block"], fa2["writes_of_a_block"]) == (columns, 1)
    assert (fa1["independent"], fa2["independent"]) == (1, columns)


def test_both_are_right_and_timed(record: Any) -> None:
    assert record["error"] < 1e-13 and set(record["times"]) == {"fa1", "fa2"}


def test_only_a_split_of_the_keys_needs_an_exchange(record: Any) -> None:
    by_keys, by_queries = record["warps"].values()
    assert by_keys["exchanged"] == (lesson.WARPS - 1) * 64 * (lesson.DIM + 2) and by_queries["exchanged"] == 0
    assert max(by_keys["error"], by_queries["error"]) < 1e-13


def test_absorbed_is_a_softmax() -> None:
    rng = np.random.default_rng(0)
    S, v = rng.standard_normal((3, 5)), rng.standard_normal((5, 2))
    weights = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(lesson.absorbed(S, v).normalized(), weights @ v)
