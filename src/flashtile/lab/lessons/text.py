"""The output of a lesson: paragraphs, tables and timings as plain text of at most 80 columns."""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flashtile.lab.bench.timing import Timing
from flashtile.lab.units import seconds

COLUMNS = 80


class Say:
    """Prints what a lesson says, line by line, with a function that takes a line."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self.line = line

    def __call__(self, text: str) -> None:
        self.line(text)

    def paragraph(self, *sentences: str) -> None:
        """Print wrapped sentences and an empty line."""
        for line in textwrap.wrap(" ".join(sentences), COLUMNS):
            self(line)
        self("")

    def heading(self, text: str) -> None:
        self(text)
        self("=" * len(text))

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table whose first column is text and whose others are numbers, and an empty line."""
        cells = [tuple(head), *(tuple(row) for row in rows)]
        widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
        cells.insert(1, tuple("-" * width for width in widths))
        for first, *others in cells:
            columns = (first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True)))
            self("  ".join(columns).rstrip())
        self("")

    def timings(self, what: str, times: Mapping[str, Timing]) -> dict[str, Any]:
        """Print a table of contenders that took turns, and return it as a record."""
        rows = [
            (name, seconds(t.median), f"{seconds(t.quartiles[0])} to {seconds(t.quartiles[1])}", str(len(t.samples)))
            for name, t in times.items()
        ]
        self.table((what, "median", "half of the runs", "runs"), rows)
        return {name: t.to_dict() for name, t in times.items()}
