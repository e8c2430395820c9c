"""The way of a call: how many files it passes through, and that docs/architecture.md shows it as it is."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from tests.backends.native.core import needs_native
from tests.tools import architecture
from tests.tools.tree import ROOT

pytestmark = needs_native
MOST = {"NumPy": 5, "torch": 5, "torch, to be trained": 6, "its backward pass": 6}


@pytest.fixture(scope="module")
def ways() -> dict[str, architecture.Way]:
    return architecture.ways()


@pytest.mark.parametrize("call", MOST)
def test_files_of_a_warm_call(ways: dict[str, architecture.Way], call: str) -> None:
    assert len(ways[call]) <= MOST[call], ways[call]
    assert "backends/native/runner.py" in ways[call]
    assert not {"problem.py", "dispatch.py"} & set(ways[call]), "it is described once"


def test_a_first_call_is_described_and_chooses(ways: dict[str, architecture.Way]) -> None:
    assert {"problem.py", "dispatch.py", "checks/options.py"} <= set(ways["first call of its kind"])


def test_the_picture_is_that_of_the_code(ways: dict[str, architecture.Way]) -> None:
    assert architecture.PICTURE.read_text() == architecture.svg(ways), "run: python -m tests.tools.architecture"


def test_the_document_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.(?:py|h|cpp))`", text)
    assert len(named) > 9
    assert all((ROOT / "src" / "flashtile" / name).exists() for name in named), named
