"""Who is timed with whom in a lesson."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.lab.bench import suite
from flashtile.lab.bench.timing import Timing


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Those that took turns, as often as some did; nobody is timed."""
    found: list[set[str]] = []

    def timed(calls: dict[str, Any], **options: Any) -> dict[str, Timing]:
        found.append(set(calls))
        return dict.fromkeys(calls, Timing((1.0,)))

    monkeypatch.setattr(suite, "alternate", timed)
    return found
