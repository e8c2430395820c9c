"""Output: results to stdout, progress and remarks to stderr, and checks that files can be written."""

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashtile.lab.bench.suite import Progress as Report
from flashtile.lab.cli import MISSING


def out() -> Console:
    """The console for results; rich honours NO_COLOR and drops all styling if stdout is not a terminal.

    Text in brackets is text, not markup: it belongs to pip's extras, to paths and to other programs' messages.
    """
    return Console(highlight=False, markup=False)


def err() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


def remark(text: str) -> None:
    """Print to stderr, on one line."""
    err().print(text, soft_wrap=True)


def missing(what: str) -> typer.Exit:
    """Say what is missing here, and return what ends the program for that reason."""
    remark(what)
    return typer.Exit(MISSING)


def say(text: str) -> None:
    """Print a sentence: wrapped on a terminal, else on one line."""
    console = out()
    console.print(text, soft_wrap=not console.is_terminal)


def markdown(text: str) -> None:
    """Print markdown: rendered on a terminal, else plain."""
    console = out()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text.removesuffix("\n"))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def command() -> str:
    """The command that starts this program: its name if the shell finds it, else its path."""
    path = sys.argv[0]
    if shutil.which("flashtile") or not os.path.isfile(path):
        return "flashtile"
    near = os.path.relpath(path)
    near = near if os.sep in near else os.path.join(".", near)
    return shlex.quote(min(near, path, key=len) if os.sep in path else near)


def check_writable(option: str, path: Path) -> None:
    """Refuse a path that cannot be written, before anything is computed for it, and leave nothing there."""
    try:
        nearest = next((folder for folder in path.absolute().parents if folder.exists()), path)
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{option}: cannot write {path}: {error.strerror}") from None


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Build a table whose first column is text and whose others are numbers."""
    shown = Table(title=title, title_justify="left", title_style="bold")
    for n, name in enumerate(head):
        shown.add_column(name, justify="left" if n == 0 else "right", overflow="fold")  # never truncate a number
    for row in rows:
        shown.add_row(*row)
    return shown


def facts(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Build a table of names and values, one per line."""
    shown = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    for row in rows:
        shown.add_row(*row)
    return shown


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Show a bar on stderr; the caller reports what comes next, how many are done, and of how many.

    It is drawn only at those reports: a refresh thread would disturb the measurements.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err(), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        yield report
