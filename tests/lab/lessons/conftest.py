"""Fixture: the contenders of a lesson that take turns."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.lab.bench import suite
from flashtile.lab.bench.timing import Timing


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The sets of contenders that took turns, without timing them."""
    found: list[set[str]] = []

    def timed(calls: dict[str, Any], **options: Any) -> dict[str, Timing]:
        found.append(set(calls))
        return dict.fromkeys(calls, Timing((1.0,)))

    monkeypatch.setattr(suite, "alternate", timed)
    return found
