"""flashtile demo: run the studies, lessons and speed test on this machine, and write a page about them."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashtile.host import machine
from flashtile.lab.cli import DOES_NOT_HOLD, output

if TYPE_CHECKING:
    from flashtile.lab.report.content import Content, LessonResult, Result

EXTRA = ("jinja2", "matplotlib")  # required for the page
LINES = 8  # of a lesson's output; `flashtile lesson` prints all of it
NEXT = ("lesson online-softmax", "explain --model llama-3-8b --gpu h100")


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the page, its figures and its records.")] = Path(
        "flashtile-demo"
    ),
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short measurements, figures as SVG only.")] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="Print every table, and the beginning of each lesson.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the records as plain JSON.")] = False,
    no_page: Annotated[bool, typer.Option("--no-page", help="Write nothing, only print.")] = False,
) -> None:
    """Check and time tiled attention here, and write a page about it.

    The result of tiled attention, its memory and its speed are computed on this machine; the page explains them.
    """
    from flashtile.lab.report import folder  # slow to import, so not for the other commands
    from flashtile.lab.report.artist import Artist
    from flashtile.lab.report.content import collect

    if no_page and open_page:
        raise typer.BadParameter("--open: with --no-page there is no page to open")
    if json and tables:
        raise typer.BadParameter("--tables: --json already prints their contents")
    if not no_page:
        _prepare(out)
    with output.progress_bar() as progress:
        if no_page:
            content, page = collect(quick, progress), None
        else:
            with Artist(png=not quick) as artist:
                content = collect(quick, progress, artist)
                page = folder.write(content, artist.drawings(), out)
    if json:
        output.print_json(content.records())
    else:
        _show(content, tables)
    if page is not None:
        (output.err() if json else output.out()).print(f"page: {page}", soft_wrap=True)
        if open_page:
            webbrowser.open(page.as_uri())
    if not json:
        for what in NEXT if tables else (*NEXT, "demo --tables"):
            output.out().print(f"next: {output.command()} {what}", soft_wrap=True)
    if content.broken:
        output.err().print(f"does not hold: {', '.join(content.broken)}")
        raise typer.Exit(DOES_NOT_HOLD)


def _prepare(out: Path) -> None:
    """Report anything that would prevent writing the page before computing anything."""
    from flashtile.lab.report import folder

    missing = [package for package in EXTRA if not machine.has(package)]
    if missing:
        how = "run: pip install 'flashtile[report]', or use --no-page"
        raise output.missing(f"flashtile: the page needs {missing[0]}; {how}")
    try:
        folder.check(out)
    except ValueError as error:
        raise typer.BadParameter(f"--out: {error}") from None
    output.check_writable("--out", out)


def _show(content: "Content", tables: bool) -> None:
    about = content.machine
    output.say(f"{about['processor']}, {about['isa'] or 'no C++ core'}, {about['cores']} cores")
    for study in content.results:
        _show_study(study, tables)
    for result in content.lessons if tables else ():
        _show_lesson(result)
    output.out().print()


def _show_study(result: "Result", tables: bool) -> None:
    out = output.out()
    out.print()
    out.rule(result.study.title, align="left", characters="=")
    output.say(result.study.question)
    for table in result.tables if tables else ():
        out.print(output.table(*table))
    for sentence in result.findings:
        output.say(f"- {sentence}")


def _show_lesson(result: "LessonResult") -> None:
    out = output.out()
    out.print()
    out.rule(f"Lesson: {result.lesson.title}", align="left", characters="=")
    if result.reason:
        output.say(f"It did not run here: {result.reason}")
        return
    print(_beginning(result.text), end="\n\n")
    output.say(f"For all of it: {output.command()} lesson {result.lesson.name}")


def _beginning(text: str) -> str:
    """The first complete paragraphs and tables."""
    parts = text.rstrip().split("\n\n")
    shown = parts[:1]
    while len(shown) < len(parts) and sum(part.count("\n") + 2 for part in shown) < LINES:
        shown.append(parts[len(shown)])
    return "\n\n".join(shown)
