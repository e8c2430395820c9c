"""Tables that only the page has: from the records of lessons, from the machine, and the alignment of columns."""

import re
from collections.abc import Iterable
from typing import Any

from flashtile.lab.report.content import Content, LessonResult
from flashtile.lab.studies.study import Table
from flashtile.lab.units import size

_NUMBER = re.compile(r"[-+]?\d|(none|not published)?$")


def worked(record: Any) -> Table:
    """All worked examples in one table, from the record of the study arithmetic."""
    rows = []
    for example in record.examples:
        rows += [("" if n else example.title, *row) for n, row in enumerate(example.rows)]
    return Table("Worked out", ("example", "what", "sum", "result"), tuple(rows))


def followed(row: dict[str, Any]) -> Table:
    """One token, tile by tile, from the record of the lesson online-softmax."""
    names = ("max", "m", "factor", "sum", "l", "o")
    return Table(
        "One row of scores, tile by tile",
        ("keys", "largest here", "m", "factor", "sum here", "l", "O, first number"),
        tuple(
            (f"{n * row['tile']} to {(n + 1) * row['tile'] - 1}", *(f"{step[name]:.4f}" for name in names))
            for n, step in enumerate(row["steps"])
        ),
    )


def launched(counted: dict[str, Any]) -> Table:
    """Every launch and its traffic, from the record of the lesson launches."""
    return Table(
        f"Every launch, N = {counted['n']:,}",
        ("attention", "kernel", "read", "written"),
        tuple(
            (way, launch["kernel"], size(launch["read"]), size(launch["written"]))
            for way in ("standard", "flash")
            for launch in counted[way]["launches"]
        ),
    )


def ordered(orders: dict[str, Any]) -> Table:
    """FA1 and FA2, from the record of the lesson fa1-vs-fa2."""
    fa1, fa2 = orders["moved"]["fa1"], orders["moved"]["fa2"]
    exchanged = [f"{way['exchanged']:,}" for way in orders["warps"].values()]
    return Table(
        "The two orders, counted",
        ("what", "FA1", "FA2"),
        (
            ("read", size(fa1["read"]), size(fa2["read"])),
            ("written", size(fa1["written"]), size(fa2["written"])),
            ("writes of a block of O", str(fa1["writes_of_a_block"]), str(fa2["writes_of_a_block"])),
            ("independent loops per head", str(fa1["independent"]), str(fa2["independent"])),
            ("numbers exchanged between warps", *exchanged),
        ),
    )


def available(content: Content) -> Table:
    return Table(
        "The backends, on this machine",
        ("backend", "device", "here"),
        tuple((row["backend"], row["device"], row["why_not"] or "ready") for row in content.backends),
    )


def needed(content: Content) -> Table:
    """What each lesson uses, and how it ran."""
    return Table(
        "The lessons, on this machine",
        ("lesson", "uses beyond NumPy", "here"),
        tuple(
            (
                result.lesson.title,
                ", ".join(result.lesson.needs) or "nothing",
                result.reason or _ran(result),
            )
            for result in content.lessons
        ),
    )


def _ran(result: LessonResult) -> str:
    where = {"cuda": "ran on the GPU", "cpu": "ran, with its kernel interpreted on the CPU"}
    return where.get(result.record.get("device", ""), "ran without its kernel" if result.lesson.kernel else "ran")


def versions(content: Content) -> Table:
    found = content.machine["versions"]
    rows = [(name, version or "not installed") for name, version in found.items()]
    rows += [("processor", content.machine["processor"]), ("instruction set", content.machine["isa"] or "no C++ core")]
    rows += [("system", content.machine["system"]), ("commit", content.machine["commit"] or "not in a checkout")]
    return Table("The machine and its software", ("what", "which"), tuple(rows))


def kinds(table: Table) -> list[str]:
    """For each column, whether it holds numbers, which are right-aligned, or text."""
    columns: Iterable[tuple[str, ...]] = zip(*table.rows, strict=True) if table.rows else [()] * len(table.head)
    _, *others = ("number" if all(_NUMBER.match(cell) for cell in column) else "text" for column in columns)
    return ["text", *others]  # the first column names the row
