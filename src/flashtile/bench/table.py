"""Records as markdown: the tables of the README are made here and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flashtile.bench.records import Record, read

BEGIN, END = "<!-- bench: {} -->", "<!-- end of bench -->"
_MARKED = re.compile(r"<!-- bench: (?P<path>\S*) -->\n(?P<body>.*?)<!-- end of bench -->", re.DOTALL)


def summary(record: Record) -> str:
    """One row a group: how it stands to its bar."""
    rows: list[tuple[str, ...]] = [("what", "measure", "mean", "worst", "bar", "holds")]
    for s in record["summary"]:
        bar = _number(s["bar"]) + (
            f", none over {_number(s['worst_bar'])}" if s["worst_bar"] not in (None, 1.0) else ""
        )
        holds = {True: "yes", False: "no", None: "not measured"}[s["holds"]]
        rows.append((s["title"], s["measure"], _number(s["value"]), _number(s["worst"]), bar, holds))
    return _markdown(rows)


def details(record: Record) -> str:
    """One row a case: the time of everyone who was timed."""
    names = list(dict.fromkeys(name for row in record["measurements"] for name in row.get("times", {})))
    rows: list[tuple[str, ...]] = [
        ("group", "case", "direction", *(f"{name}, ms" for name in names), "ratio", "GFLOP/s")
    ]
    for m in record["measurements"]:
        if "times" in m:
            times = [_milliseconds(m["times"].get(name)) for name in names]
            rate = "" if m.get("gflops") is None else f"{m['gflops']:.0f}"
            rows.append((m["group"], m["case"], m["direction"], *times, _number(m.get("ratio")), rate))
    return _markdown(rows)


def memory(record: Record) -> str:
    """One row a pass: how far a process grew."""
    rows: list[tuple[str, ...]] = [("case", "pass", "flashtile, MB", "torch SDPA, MB")]
    for m in record["measurements"]:
        if "grown" in m:
            grown = [m["grown"].get(name) for name in ("flashtile", "torch SDPA")]
            rows.append((m["case"], m["direction"], *("" if g is None else f"{g / 2**20:.1f}" for g in grown)))
    return _markdown(rows) if len(rows) > 1 else ""


def caption(record: Record) -> str:
    m = record["machine"]
    versions = ", ".join(
        f"{name} {m['versions'][name]}" for name in ("flashtile", "torch", "numpy") if m["versions"][name]
    )
    commit = f", commit {m['commit'][:12]}" if m["commit"] else ""
    return f"{m['processor']}, {m['isa'] or 'no C++ core'}, {record['threads']} threads; {versions}{commit}."


def render(record: Record) -> str:
    """What the README shows of a record."""
    parts = (caption(record), summary(record), memory(record))
    return "\n\n".join(part for part in parts if part) + "\n"


def marked(text: str) -> tuple[str, str] | None:
    """The record that a document's table was made from, and that table; None where it has no such place."""
    found = _MARKED.search(text)
    return None if found is None else (found["path"], found["body"])


def put_into(document: Path, record: Path) -> None:
    """Make a document's table anew from a record; the path is kept relative to the document."""
    path = record.resolve().relative_to(document.resolve().parent).as_posix()
    text = f"{BEGIN.format(path)}\n{render(read(record))}{END}"
    before = document.read_text()
    if marked(before) is None:
        raise ValueError(f"{document}: expected a line {BEGIN.format('...')} and a line {END}")
    document.write_text(_MARKED.sub(lambda _: text, before))


def _number(x: Any) -> str:
    return "" if x is None else f"{x:.2f}"


def _milliseconds(timing: dict[str, Any] | None) -> str:
    return "" if timing is None else f"{timing['median_s'] * 1e3:.3g}"


def _markdown(rows: list[tuple[str, ...]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
