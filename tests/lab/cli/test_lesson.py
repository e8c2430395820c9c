"""flashtile lesson: the list, a run, the source, JSON, and exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from flashtile.lab.cli.app import app
from flashtile.lab.lessons import LESSONS, lesson
from flashtile.lab.lessons.text import COLUMNS

NAME = "fa1-vs-fa2"


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["lesson", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_list() -> None:
    lines = run().stdout.splitlines()
    assert all(any(line.startswith(one.name) for line in lines) for one in LESSONS)
    assert max(map(len, lines)) <= COLUMNS
    assert [one["lesson"] for one in json.loads(run("--json").stdout)] == [one.name for one in LESSONS]


def test_a_run() -> None:
    assert run(NAME, "--quick").stdout.startswith("The order of writes")
    found = json.loads(run(NAME, "--quick", "--json").stdout)
    assert found["lesson"] == NAME and found["record"]["holds"] and found["text"].startswith("The order of writes")


def test_the_source() -> None:
    text = run("cuda-attention", "--source").stdout
    assert "__global__" in text and "def run(" in text
    assert json.loads(run("cuda-attention", "--source", "--json").stdout)["source"] == text


def test_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "expected one of online-softmax" in run("abacus", code=2).output

    def unavailable(*given: Any) -> Any:
        raise lesson.Unavailable("the moon is wrong")

    for module in (lesson, __import__("flashtile.lab.cli.lesson", fromlist=["run"])):
        monkeypatch.setattr(module, "run", unavailable)
    assert "fa1-vs-fa2: the moon is wrong" in run(NAME, code=3).stderr
    assert json.loads(run(NAME, "--json", code=3).stdout)["unavailable"] == "the moon is wrong"
    monkeypatch.setattr(lesson, "run", lambda *given: {"holds": False})
    run(NAME, "--json", code=1)
