"""Progress is drawn only when something is reported, and printed commands work from here."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from rich.console import Console

from flashtile.lab.cli import output


def test_progress_is_drawn_only_on_reports(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A flashtile script in a virtual environment that is not on the shell's path."""
    path = tmp_path / ".venv" / "bin" / "flashtile"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return path


def test_a_printed_command_works_from_here(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.command() == ".venv/bin/flashtile"
    monkeypatch.chdir(script.parent)
    assert output.command() == "./flashtile"
    monkeypatch.chdir("/")
    assert Path(output.command()).resolve() == script.resolve()
    monkeypatch.setenv("PATH", str(script.parent))
    assert output.command() == "flashtile"


def test_a_path_with_a_space_can_be_pasted(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = script.parents[2] / "my home"
    script.parents[1].rename(home)
    monkeypatch.setattr(sys, "argv", [str(home / "bin" / "flashtile")])
    assert output.command() == "'my home/bin/flashtile'"


def test_without_a_script_the_name_is_printed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert output.command() == "flashtile"


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = "run: pip install 'flashtile[gpu]'"
    output.say(words)
    output.err().print(words)
    output.out().print(output.table(words, (words,), [(words,)]))
    printed = capsys.readouterr()
    assert printed.out.count(words) == 4 and words in printed.err
