"""Lesson: its description, its source, and how to run it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtile.lab.lessons.text import Say

HERE = Path(__file__).parent


class Unavailable(Exception):  # noqa: N818
    """This lesson cannot run here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A file of this folder with run(say, quick) -> record. `needs` lists what it uses beyond NumPy: triton, gpu."""

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
        """The files to read: the lesson and its kernel."""
        lesson = HERE / f"{self.name.replace('-', '_')}.py"
        return (lesson,) if self.kernel is None else (lesson, HERE / "kernels" / self.kernel)


def source(lesson: Lesson) -> str:
    """The source of the lesson, followed by that of its kernel."""
    return "\n\n".join(path.read_text() for path in lesson.files)


def run(lesson: Lesson, line: Callable[[str], None], quick: bool = False) -> dict[str, Any]:
    """Run a lesson here, giving `line` each line that it says; return its plain record, or raise Unavailable."""
    record: dict[str, Any] = importlib.import_module(lesson.module).run(Say(line), quick)
    return record


def answer(lesson: Lesson, quick: bool = False) -> dict[str, Any]:
    """Return a lesson's text and record, or the reason why there are none, as one value for JSON."""
    lines: list[str] = []
    try:
        record = run(lesson, lines.append, quick)
    except Unavailable as reason:
        return {"lesson": lesson.name, "unavailable": str(reason)}
    return {"lesson": lesson.name, "text": "\n".join(lines), "record": record}
