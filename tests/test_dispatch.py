"""dispatch.py: which row runs what, by what rows support and what suits them, with tables made up for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile import dispatch
from flashtile.dispatch import Backend
from flashtile.problem import describe

PROBLEM = describe(*(np.zeros((1, 2, n, 8), np.float32) for n in (3, 5, 5)))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """table(first={"suits": False}, second={}): rows with these answers, in this order."""

    def lay(**rows: dict[str, Any]) -> list[str]:
        asked: list[str] = []

        def module(name: str) -> Any:
            def answer(question: str) -> Any:
                def told(*_: Any) -> Any:
                    asked.append(f"{name}.{question}")
                    return rows[name][question]

                return told

            return SimpleNamespace(**{question: answer(question) for question in rows[name]})

        modules = {name: module(name) for name in rows}
        monkeypatch.setattr(Backend, "load", lambda self: modules[self.name])
        monkeypatch.setattr(dispatch, "TABLE", tuple(Backend(name, name, "cpu", "made up") for name in rows))
        monkeypatch.setattr(dispatch, "NAMES", ("auto", *rows))
        return asked

    return lay


FIT, UNFIT, UNABLE, AWAY = {"suits": True}, {"suits": False}, {"why_not": "no"}, {"missing": "away"}


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([{}, {}], 0),
        ([FIT, FIT], 0),
        ([UNFIT, {}], 1),
        ([UNFIT, UNABLE, {}], 2),
        ([UNFIT, UNABLE], 0),
        ([UNFIT, AWAY], 0),
        ([UNABLE, UNFIT], 1),
        ([UNFIT, UNFIT], 1),
        ([UNFIT, UNFIT, FIT, FIT], 2),
        ([{**UNABLE, **FIT}, {}], 1),
        ([{**AWAY, **FIT}, {}], 1),
    ],
    ids=str,
)
def test_auto(table: Any, rows: list[dict[str, Any]], chosen: int) -> None:
    """A row that does not suit is passed over as long as a later one can."""
    table(**{f"row{n}": row for n, row in enumerate(rows)})
    assert dispatch.choose(PROBLEM).name == f"row{chosen}"


def test_whoever_is_asked_for_need_not_suit(table: Any) -> None:
    table(first=UNFIT, second={})
    assert dispatch.choose(PROBLEM, "first").name == "first"
    assert dispatch.choose(PROBLEM, "second").name == "second"


def test_rows_behind_the_chosen_one_are_not_asked(table: Any) -> None:
    asked = table(first={"why_not": None, "suits": True}, second={"why_not": None})
    dispatch.choose(PROBLEM)
    assert asked == ["first.why_not", "first.suits"]


def test_what_a_row_cannot_do_does_not_have_to_suit_it(table: Any) -> None:
    """suits() may take for granted what why_not() has seen to."""
    asked = table(first={**UNABLE, **FIT}, second={})
    dispatch.choose(PROBLEM)
    assert asked == ["first.why_not"]


def test_the_reasons_of_all_rows_are_told(table: Any) -> None:
    table(first=UNABLE, second=AWAY)
    with pytest.raises(ft.UnsupportedError, match=r"none can run this on cpu: first: no; second: away$"):
        dispatch.choose(PROBLEM)
    with pytest.raises(ft.UnsupportedError, match=r"first: it runs on cpu, the tensors are on moon; second"):
        dispatch.choose(PROBLEM, device="moon")


def test_a_row_that_cannot_says_who_could(table: Any) -> None:
    table(first=UNABLE, second=UNFIT, third={})
    with pytest.raises(ft.UnsupportedError, match=r"^backend: first cannot run this: no; could: second, third$"):
        dispatch.choose(PROBLEM, "first")
    table(first=UNABLE)
    with pytest.raises(ft.UnsupportedError, match=r"no other backend could$"):
        dispatch.choose(PROBLEM, "first")
    with pytest.raises(ft.UnsupportedError, match=r"expected one of auto, first, got 'fifth'"):
        dispatch.choose(PROBLEM, "fifth")


def test_rows_made_for_one_generation_of_gpus() -> None:
    runs_on = {row.name: [c for c in (None, (8, 0), (9, 0), (10, 0)) if row.runs_on(c)] for row in dispatch.TABLE}
    assert runs_on.pop("gluon") == [(9, 0)]
    assert all(len(generations) == 4 for generations in runs_on.values())
