"""flashtile demo: equivalence, memory and speed on this machine, in under a minute."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flashtile.bench import showcase
from flashtile.bench.peers import NAIVE_NUMPY, OURS
from flashtile.cli import output


def demo(
    json: Annotated[bool, typer.Option("--json", help="Print plain JSON.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads to use; all by default.")] = None,
) -> None:
    """Show that tiled attention is the same, needs far less memory, and is fast, on this machine."""
    with output.progress_bar() as progress:
        result = showcase.run(progress, threads=threads)
    if json:
        output.print_json(result)
    else:
        _show(result)
    if not result["holds"]:
        raise typer.Exit(output.DOES_NOT_HOLD)


def _show(result: dict[str, Any]) -> None:
    out = output.out()
    machine = result["machine"]
    out.print(f"{machine['processor']}, {machine['isa'] or 'no C++ core'}, {result['threads']} threads")
    for peer, reason in result["absent"].items():
        out.print(f"{peer}: not compared, {reason}")
    out.print(
        output.table(
            "Same answer: largest error against float64 standard attention",
            ("case", "dtype", "ways", "worst error", "allowed", ""),
            [
                (
                    row["case"],
                    row["dtype"],
                    str(len(row["errors"])),
                    f"{max(row['errors'].values()):.1e}",
                    f"{row['limit']:.1e}",
                    "ok" if row["holds"] else "TOO LARGE",
                )
                for row in result["equivalence"]
            ],
        )
    )
    out.print(
        output.table(
            "Less memory: what one head makes a process grow by, float32, D = 64",
            ("N", "score matrix", "naive NumPy grew", "flashtile grew", "of which output"),
            [
                (
                    str(row["n"]),
                    output.size(row["score_matrix"]),
                    _grown(row["grown"][NAIVE_NUMPY]),
                    _grown(row["grown"][OURS]),
                    output.size(row["output"]),
                )
                for row in result["memory"]
            ],
        )
    )
    names = list(result["speed"][0]["times"])
    out.print(
        output.table(
            "Fast: median time of a forward pass",
            ("case", *names),
            [
                (row["case"], *(output.seconds(row["times"][name]["median_s"]) for name in names))
                for row in result["speed"]
            ],
        )
    )


def _grown(grown: int | None) -> str:
    return "not measured" if grown is None else output.size(grown)
