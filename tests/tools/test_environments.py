"""docs/versions.md matches its record; the tests with other releases are slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flashtile.host import machine
from tests.tools import environments


@pytest.fixture(scope="module")
def package() -> Path:
    try:
        return environments.wheel()
    except environments.CannotInstall as error:
        pytest.skip(f"{error}")


@pytest.mark.slow
@pytest.mark.parametrize("environment", environments.ENVIRONMENTS, ids=lambda environment: environment.name)
def test_other_releases(environment: environments.Environment, package: Path) -> None:
    try:
        row = environments.run(environment, package)
    except environments.CannotInstall as error:
        pytest.skip(f"{error}")
    assert row["passed"] and not row["failures"]


def test_the_document_matches_its_record() -> None:
    text, record = environments.DOCUMENT.read_text(), json.loads(environments.RECORD.read_text())
    assert environments.MARKED.search(text) and text == environments.renewed(text, record)


def test_tested_releases_are_supported() -> None:
    for row in json.loads(environments.RECORD.read_text())["environments"]:
        assert row["passed"] and not row["failures"]
        assert all(machine.too_old(name, row["versions"][name]) is None for name in ("torch", "transformers"))


def test_a_new_row_replaces_the_old_one(monkeypatch: Any, tmp_path: Path) -> None:
    def row(name: str, passed: int) -> dict[str, Any]:
        versions = dict.fromkeys(environments.SHOWN, "1.2")
        return {"name": name, "versions": versions, "passed": passed, "failed": 0, "skipped": 1, "failures": []}

    monkeypatch.setattr(environments, "RECORD", tmp_path / "r.json")
    monkeypatch.setattr(environments, "DOCUMENT", tmp_path / "d.md")
    environments.DOCUMENT.write_text("a\n<!-- versions -->\nold\n<!-- end of versions -->\nb\n")
    for name, passed in (("torch-newest", 7), ("torch-oldest", 8), ("torch-newest", 9)):
        environments.save(row(name, passed))
    found = json.loads(environments.RECORD.read_text())["environments"]
    assert [(row["name"], row["passed"]) for row in found] == [("torch-oldest", 8), ("torch-newest", 9)]
    assert "old" not in environments.DOCUMENT.read_text() and "| 9 | 0 | 1 |" in environments.DOCUMENT.read_text()


@pytest.mark.parametrize(("inside", "outcome"), [("", "passed"), ("<skipped/>", "skipped"), ("<error/>", "failed")])
def test_outcomes(inside: str, outcome: str) -> None:
    case = ElementTree.fromstring(f'<testcase classname="a" name="b">{inside}</testcase>')
    assert environments._outcome(case) == (outcome, "a.b")
