"""Lesson: how a lesson is listed, read and run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Say = Callable[[str], None]  # takes a line of text
HERE = Path(__file__).parent


class Unavailable(Exception):  # noqa: N818
    """This lesson cannot run here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A file of this folder with run(say, quick) -> record. `needs` is what it uses beyond NumPy: triton, gpu."""

    name: str
    title: str
    summary: str
    needs: tuple[str, ...] = ()
    kernel: str | None = None  # a file of kernels/

    @property
    def module(self) -> str:
        return f"flashtile.lab.lessons.{self.name.replace('-', '_')}"

    @property
    def files(self) -> tuple[Path, ...]:
        """What there is to read: the lesson, and its kernel."""
        lesson = HERE / f"{self.name.replace('-', '_')}.py"
        return (lesson,) if self.kernel is None else (lesson, HERE / "kernels" / self.kernel)


def source(lesson: Lesson) -> str:
    """The text of the lesson's file, and of its kernel's after it."""
    return "\n\n".join(path.read_text() for path in lesson.files)


def run(lesson: Lesson, say: Say, quick: bool = False) -> dict[str, Any]:
    """Run a lesson in this process; returns its record in plain values. Raises Unavailable with the reason."""
    record: dict[str, Any] = importlib.import_module(lesson.module).run(say, quick)
    return record


def answer(lesson: Lesson, quick: bool = False) -> dict[str, Any]:
    """A lesson's text and record, or the reason why there are none, as one value for JSON."""
    lines: list[str] = []
    try:
        record = run(lesson, lines.append, quick)
    except Unavailable as reason:
        return {"lesson": lesson.name, "unavailable": str(reason)}
    return {"lesson": lesson.name, "text": "\n".join(lines), "record": record}
