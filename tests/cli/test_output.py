"""Progress: drawn at once when something is reported, and at no other time."""

from __future__ import annotations

import io
import threading

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from rich.console import Console

from flashtile.cli import output


def test_progress_is_drawn_by_whoever_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(output, "err", lambda: Console(file=drawn, force_terminal=True, width=80))
    threads = threading.active_count()
    with output.progress_bar() as report:
        for n, what in enumerate(("first", "second")):
            before = drawn.tell()
            report(what, n, 2)
            shown = drawn.getvalue()[before:]
            assert what in shown and f"{n}/2" in shown
            assert threading.active_count() == threads
