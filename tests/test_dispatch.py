"""dispatch.py: which row runs a problem, by what rows support and what suits them, with tables made for the tests."""

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
    """table(first={"suits": False}, second={}) makes rows with these answers, in this order."""

    def make(**rows: dict[str, Any]) -> list[str]:
        called: list[str] = []

        def module(name: str) -> Any:
            def hook(function: str) -> Any:
                def answer(*_: Any) -> Any:
                    called.append(f"{name}.{function}")
                    return rows[name][function]

                return answer

            return SimpleNamespace(**{function: hook(function) for function in rows[name]})

        modules = {name: module(name) for name in rows}
        monkeypatch.setattr(Backend, "load", lambda self: modules[self.name])
        monkeypatch.setattr(dispatch, "TABLE", tuple(Backend(name, name, "cpu", "made up") for name in rows))
        monkeypatch.setattr(dispatch, "NAMES", ("auto", *rows))
        return called

    return make


SUITED, UNSUITED = {"suits": True}, {"suits": False}
UNABLE, MISSING = {"why_not": "no"}, {"missing": "away"}


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([{}, {}], 0),
        ([SUITED, SUITED], 0),
        ([UNSUITED, {}], 1),
        ([UNSUITED, UNABLE, {}], 2),
        ([UNSUITED, UNABLE], 0),
        ([UNSUITED, MISSING], 0),
        ([UNABLE, UNSUITED], 1),
        ([UNSUITED, UNSUITED], 1),
        ([UNSUITED, UNSUITED, SUITED, SUITED], 2),
        ([{**UNABLE, **SUITED}, {}], 1),
        ([{**MISSING, **SUITED}, {}], 1),
    ],
    ids=str,
)
def test_auto(table: Any, rows: list[dict[str, Any]], chosen: int) -> None:
    """A row that does not suit is skipped if a later one can run the problem."""
    table(**{f"row{n}": row for n, row in enumerate(rows)})
    assert dispatch.choose(PROBLEM).name == f"row{chosen}"


def test_an_explicit_backend_need_not_suit(table: Any) -> None:
    table(first=UNSUITED, second={})
    assert dispatch.choose(PROBLEM, "first").name == "first"
    assert dispatch.choose(PROBLEM, "second").name == "second"


def test_rows_after_the_chosen_one_are_not_checked(table: Any) -> None:
    called = table(first={"why_not": None, "suits": True}, second={"why_not": None})
    dispatch.choose(PROBLEM)
    assert called == ["first.why_not", "first.suits"]


def test_suits_is_called_only_if_why_not_has_no_objection(table: Any) -> None:
    """suits() may rely on what why_not() has checked."""
    called = table(first={**UNABLE, **SUITED}, second={})
    dispatch.choose(PROBLEM)
    assert called == ["first.why_not"]


def test_the_error_has_the_reasons_of_all_rows(table: Any) -> None:
    table(first=UNABLE, second=MISSING)
    with pytest.raises(ft.UnsupportedError, match=r"none can run this on cpu: first: no; second: away$"):
        dispatch.choose(PROBLEM)
    with pytest.raises(ft.UnsupportedError, match=r"first: it runs on cpu, the tensors are on tpu; second"):
        dispatch.choose(PROBLEM, device="tpu")


def test_the_error_of_an_explicit_backend_names_those_that_could(table: Any) -> None:
    table(first=UNABLE, second=UNSUITED, third={})
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
