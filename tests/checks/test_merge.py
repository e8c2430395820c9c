"""The checks of merge(into=...): each error names the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.checks.merge import check_memory

OUT, LSE = np.zeros((4, 6, 8), np.float32), np.zeros((4, 6), np.float32)


def part() -> tuple[Any, Any]:
    return OUT.copy(), LSE.copy()


def read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("into", "error", "words"),
    [
        (OUT, ft.ShapeError, r"into: expected two arrays, \(out, lse\), got ndarray"),
        ((OUT,), ft.ShapeError, "into: expected two arrays"),
        ((OUT, None), ft.DTypeError, r"into\[1\]: expected an array of shape \(4, 6\), got None"),
        ((OUT[:3], LSE), ft.ShapeError, r"into\[0\]: expected shape \(4, 6, 8\), got \(3, 6, 8\)"),
        ((OUT, LSE[:3]), ft.ShapeError, r"into\[1\]: expected shape \(4, 6\)"),
        ((OUT.astype(int), LSE), ft.DTypeError, r"into\[0\]: expected one of float16"),
        ((OUT, LSE.astype(np.float16)), ft.DTypeError, r"into\[1\]: expected one of float32, float64, got float16"),
        (([0], [0]), ft.DTypeError, r"into\[0\]: expected a NumPy array like out_a, got list"),
        ((read_only(OUT), LSE), ft.ShapeError, r"into\[0\]: expected an array that can be written"),
        ((OUT, read_only(LSE)), ft.ShapeError, r"into\[1\]: expected an array that can be written"),
        ((np.zeros((4, 6, 16), np.float32)[..., ::2], LSE), ft.ShapeError, r"into\[0\]: expected a contiguous last"),
    ],
)
def test_errors(into: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        ft.merge(*part(), *part(), into=into)


def overlapping() -> dict[str, tuple[list[Any], tuple[Any, Any], str]]:
    rows = np.zeros((5, 6, 8), np.float32)
    memory = np.zeros(4 * 6 * 9, np.float32)
    expanded = np.lib.stride_tricks.as_strided(memory, (4, 6, 8), (0, 32, 4))
    a, b = part(), part()
    return {
        "shifted": ([rows[:4], a[1], *b], (rows[1:], LSE.copy()), r"into\[0\]: expected one of the results, or"),
        "another role": ([*a, *b], (OUT.copy(), a[0][..., 0]), r"into\[1\]: expected one of the results, or"),
        "each other": ([*a, *b], (memory[:192].reshape(4, 6, 8), memory[3:27].reshape(4, 6)), r"into\[0\]: expected"),
        "itself": ([*a, *b], (expanded, LSE.copy()), r"into\[0\]: expected elements with memory of their own"),
        "transposed": (
            [rows.reshape(-1)[: 6 * 6 * 6].reshape(6, 6, 6), np.zeros((6, 6), np.float32)] * 2,
            (rows.reshape(-1)[: 6 * 6 * 6].reshape(6, 6, 6).swapaxes(0, 1), np.zeros((6, 6), np.float32)),
            r"into\[0\]: expected one of the results, or",
        ),
    }


@pytest.mark.parametrize("kind", overlapping())
def test_memory_that_overlaps(kind: str) -> None:
    results, into, words = overlapping()[kind]
    with pytest.raises(ft.ShapeError, match=f"^{words}"):
        ft.merge(*results, into=into)


def test_memory_that_only_interleaves() -> None:
    """Even rows into odd ones, all heads of one tensor: no element is shared."""
    out, lse = np.ones((4, 12, 8), np.float32), np.zeros((4, 12), np.float32)
    even, odd = (out[:, ::2], lse[:, ::2]), (out[:, 1::2], lse[:, 1::2])
    ft.merge(*even, *even, into=odd)
    assert (out == 1).all() and np.allclose(odd[1], np.log(2)) and not even[1].any()
    check_memory((), (out[:, :0], lse[:, :0]))
