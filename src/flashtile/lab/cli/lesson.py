"""flashtile lesson: a short program that explains one idea, runs it and measures it; or its source."""

import textwrap
from typing import Annotated, Any

import typer

from flashtile.lab.cli import DOES_NOT_HOLD, MISSING, output
from flashtile.lab.lessons import LESSONS
from flashtile.lab.lessons.lesson import Lesson, Unavailable, answer, run, source
from flashtile.lab.lessons.text import COLUMNS


def lesson(
    name: Annotated[str | None, typer.Argument(help="The lesson to run; without it, list them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
    show: Annotated[bool, typer.Option("--source", help="Print the source instead of running it.")] = False,
) -> None:
    """Run a lesson, or list them all."""
    if name is None:
        _list(json)
        return
    found = next((lesson for lesson in LESSONS if lesson.name == name), None)
    if found is None:
        raise typer.BadParameter(f"expected one of {', '.join(lesson.name for lesson in LESSONS)}, got {name!r}")
    if show:
        text = source(found)
        output.print_json({"lesson": name, "source": text}) if json else print(text, end="")
        return
    record = _as_json(found, quick) if json else _as_text(found, quick)
    if not record["holds"]:
        raise typer.Exit(DOES_NOT_HOLD)


def _list(json: bool) -> None:
    if json:
        output.print_json(
            [{"lesson": x.name, "title": x.title, "summary": x.summary, "needs": list(x.needs)} for x in LESSONS]
        )
        return
    for x in LESSONS:
        print(f"{x.name:16} {x.title}" + (f" (uses {', '.join(x.needs)})" if x.needs else ""))
        print(textwrap.fill(x.summary, COLUMNS, initial_indent=" " * 17, subsequent_indent=" " * 17))


def _as_json(lesson: Lesson, quick: bool) -> dict[str, Any]:
    found = answer(lesson, quick)
    output.print_json(found)
    if "unavailable" in found:
        raise typer.Exit(MISSING)
    record: dict[str, Any] = found["record"]
    return record


def _as_text(lesson: Lesson, quick: bool) -> dict[str, Any]:
    try:
        return run(lesson, print, quick)
    except Unavailable as reason:
        raise output.missing(f"{lesson.name}: {reason}") from None
