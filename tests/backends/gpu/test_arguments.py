"""arguments.py: numbers that change from call to call do not make Triton specialize another kernel."""

from __future__ import annotations

from typing import Any

import pytest

import flashtile as ft
from flashtile.problem import Problem, describe

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gpu.arguments import ALIGNED, lengths, rule  # noqa: E402


def problem(batch: int, n_q: int, n_k: int, **options: Any) -> Problem:
    q, k = torch.empty(batch, 2, n_q, 8), torch.empty(batch, 2, n_k, 8)
    return describe(q, k, k, **options)


def kind(x: Any) -> Any:
    """The properties of an integer in a tuple that Triton specializes on; anything else as it is."""
    return (x == 1, x % ALIGNED == 0, -(2**31) <= x < 2**31) if isinstance(x, int) else x


def kinds(p: Problem) -> tuple[Any, ...]:
    return tuple(kind(x) for x in (*lengths(p)[:3], rule(p).left, rule(p).right, rule(p).alibi_offset, rule(p).heads))


def test_there_are_two_kinds_of_lengths() -> None:
    """Multiples and others, including 1; the number of sequences does not matter."""
    multiples = {kinds(problem(batch, 16 * batch, n_k)) for batch in (1, 2, 16) for n_k in (16, 1024)}
    others = {kinds(problem(batch, n_q, n_k)) for batch in (1, 2, 16) for n_q in (1, 17, 1023) for n_k in (1, 2, 33)}
    assert len(multiples) == len(others) == 1 and multiples != others


def test_limits_and_offsets_do_not_matter() -> None:
    edges = (-(2**30), -17, -16, -1, 0, 1, 2, 16, 17, 2**20)
    slopes = torch.ones(2)
    bands = [ft.Band(left, right, offset) for left in edges for right in edges[1:] for offset in (-1, 0, 16)]
    assert len({kinds(problem(2, 20, 30, band=band, alibi=slopes, dropout=0.5)) for band in bands}) == 1
