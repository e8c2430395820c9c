"""The output of a lesson: paragraphs, tables and timings as plain text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashtile.lab.bench.timing import Timing
from flashtile.lab.lessons.lesson import Say
from flashtile.lab.units import seconds

COLUMNS = 80


def paragraph(say: Say, *sentences: str) -> None:
    """Print wrapped sentences and an empty line."""
    for line in textwrap.wrap(" ".join(sentences), COLUMNS):
        say(line)
    say("")


def heading(say: Say, text: str) -> None:
    say(text)
    say("=" * len(text))


def table(say: Say, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column is text and whose others are numbers, and an empty line."""
    cells = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    cells.insert(1, tuple("-" * width for width in widths))
    for first, *others in cells:
        columns = (first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True)))
        say("  ".join(columns).rstrip())
    say("")


def timings(say: Say, what: str, times: Mapping[str, Timing]) -> dict[str, Any]:
    """Print a table of contenders that took turns, and return it as a record."""
    rows = [
        (name, seconds(t.median), f"{seconds(t.quartiles[0])} to {seconds(t.quartiles[1])}", str(len(t.samples)))
        for name, t in times.items()
    ]
    table(say, (what, "median", "half of the runs", "runs"), rows)
    return {name: t.to_dict() for name, t in times.items()}
