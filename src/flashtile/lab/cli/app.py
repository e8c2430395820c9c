"""The commands and their options."""

from typing import Annotated

import typer

from flashtile import __version__
from flashtile.lab.cli import bench, demo, doctor, explain, lesson

app = typer.Typer(
    help="Exact attention, tile by tile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.command("lesson")(lesson.lesson)
app.add_typer(bench.app, name="bench")
