"""flashtile bench: measure this machine beside its peers, and make tables of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashtile.bench import records, suite, table
from flashtile.bench.cases import GROUPS
from flashtile.cli import output

app = typer.Typer(help="Measure, taking turns with torch and NumPy; every run leaves a record.", no_args_is_help=True)


@app.command()
def cpu(
    json: Annotated[
        Path | None, typer.Option("--json", help="Where the record goes; - is stdout; benchmarks/records/ by default.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Short cases and few rounds.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="GROUP", help=f"Only these groups (repeatable): {', '.join(GROUPS)}.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, for us and for torch; torch's own number by default.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Exit with 1 where a bar does not hold.")] = False,
) -> None:
    """The CPU suite: forward, backward, decode, half precision, options, small calls, memory, scaling."""
    unknown = [name for name in only or () if name not in GROUPS]
    if unknown:
        raise typer.BadParameter(f"--only: expected one of {', '.join(GROUPS)}, got {unknown[0]!r}")
    with output.progress_bar() as progress:
        record = suite.run(only=only or (), short=quick, threads=threads, progress=progress)
    if json is not None and str(json) == "-":
        output.print_json(record)
    else:
        path = json or records.default_path(record)
        records.write(record, path)
        for peer, reason in record["absent"].items():
            output.err().print(f"{peer}: not compared, {reason}")
        print(table.details(record), table.render(record), sep="\n\n", end="")
        output.err().print(f"record: {path}", soft_wrap=True)
    if check and any(row["holds"] is False for row in record["summary"]):
        raise typer.Exit(output.DOES_NOT_HOLD)


@app.command("table")
def show(
    record: Annotated[
        Path, typer.Argument(help="A record that `flashtile bench cpu` wrote.", exists=True, dir_okay=False)
    ],
    details: Annotated[bool, typer.Option(help="One row a case.")] = False,
    into: Annotated[
        Path | None, typer.Option(help="Put the table into this document, in the place it has marked for it.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record's summary as plain JSON.")] = False,
) -> None:
    """A record as markdown."""
    try:
        content = records.read(record)
        if json:
            output.print_json(content["summary"])
        elif into is not None:
            table.put_into(into, record)
        else:
            print(table.details(content) if details else table.render(content), end="\n" if details else "")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
