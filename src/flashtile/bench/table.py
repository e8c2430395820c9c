"""Records as markdown: the tables of the README are made here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from os.path import relpath
from pathlib import Path
from typing import Any, NamedTuple

from flashtile.bench import markdown, records, tuned
from flashtile.bench.gpu import moved_table
from flashtile.bench.gpu import table as gpu
from flashtile.bench.markdown import milliseconds, number
from flashtile.bench.records import Record

BEGIN, END = "<!-- bench: {} -->", "<!-- end of bench -->"
_MARKED = re.compile(r"<!-- bench: (?P<path>\S*) -->\n(?P<body>.*?)<!-- end of bench -->", re.DOTALL)


class Way(NamedTuple):
    """How the records of a suite are shown."""

    fields: dict[str, type]  # what such a record has beside what all have
    parts: Callable[[Record], Iterable[str]]
    details: Callable[[Record], str]


def read(path: Path) -> Record:
    """A record that can be shown; else a ValueError that names the file."""
    record = records.read(path)
    if record["suite"] not in WAYS:
        raise ValueError(f"{path}: expected a record of the suite {' or '.join(WAYS)}, got {record['suite']!r}")
    records.demand_fields(record, WAYS[record["suite"]].fields, path)
    return record


def render(record: Record) -> str:
    """What the README shows of a record."""
    return "\n\n".join(part for part in WAYS[record["suite"]].parts(record) if part) + "\n"


def details(record: Record) -> str:
    """One row a measurement."""
    return WAYS[record["suite"]].details(record)


def summary(record: Record) -> str:
    """One row a group: how it stands to its bar."""
    rows: list[tuple[str, ...]] = [("what", "measure", "mean", "worst", "bar", "holds")]
    for s in record["summary"]:
        holds = {True: "yes", False: "no", None: "not measured"}[s["holds"]]
        if s["bar"] is None and s["worst_bar"] is None:
            holds = ""
        mean, worst = _beside(s["value"], s["bar"]), _beside(s["worst"], s["worst_bar"])
        rows.append((s["title"], s["measure"], mean, worst, _bar(s), holds))
    return markdown.table(rows)


def _beside(x: float | None, bar: float | None) -> str:
    """A number beside its bar, with a digit more where it would else look as if it were just that."""
    short = number(x)
    return number(x, 3) if x != bar and short == number(bar) else short


def _bar(s: dict[str, Any]) -> str:
    """On the mean, and on the worst where that is another one."""
    parts = [] if s["bar"] is None else [number(s["bar"])]
    if s["worst_bar"] not in (None, s["bar"]):
        parts.append(f"none {'under' if s.get('at_least') else 'over'} {number(s['worst_bar'])}")
    return ", ".join(parts)


def cases(record: Record) -> str:
    """One row a case of the CPU suite: the time of everyone who was timed."""
    names = list(dict.fromkeys(name for row in record["measurements"] for name in row.get("times", {})))
    rows: list[tuple[str, ...]] = [
        ("group", "case", "direction", *(f"{name}, ms" for name in names), "ratio", "GFLOP/s")
    ]
    for m in record["measurements"]:
        if "times" in m:
            times = [milliseconds(m["times"].get(name)) for name in names]
            rows.append(
                (m["group"], m["case"], m["direction"], *times, number(m.get("ratio")), number(m.get("gflops"), 0))
            )
    return markdown.table(rows)


def memory(record: Record) -> str:
    """One row a pass: how far a process grew."""
    rows: list[tuple[str, ...]] = [("case", "pass", "flashtile, MiB", "torch SDPA, MiB")]
    for m in record["measurements"]:
        if "grown" in m:
            grown = [m["grown"].get(name) for name in ("flashtile", "torch SDPA")]
            rows.append((m["case"], m["direction"], *("" if g is None else f"{g / 2**20:.1f}" for g in grown)))
    return markdown.table(rows) if len(rows) > 1 else ""


def caption(record: Record) -> str:
    m = record["machine"]
    versions = ", ".join(
        f"{name} {m['versions'][name]}" for name in ("flashtile", "torch", "numpy") if m["versions"][name]
    )
    commit = f", commit {m['commit'][:12]}" if m["commit"] else ""
    return f"{m['processor']}, {m['isa'] or 'no C++ core'}, {record['threads']} threads; {versions}{commit}."


def marked(text: str) -> dict[str, str]:
    """The tables of a document, by the record each was made from; "" is a place that waits for its first record."""
    return {found["path"]: found["body"] for found in _MARKED.finditer(text)}


def put_into(document: Path, record: Path) -> None:
    """Make the table of this record anew, or put it where a place waits; its path is relative to the document."""
    path = Path(relpath(record.resolve(), document.resolve().parent)).as_posix()
    before = document.read_text()
    places = marked(before)
    place = path if path in places else ""
    if place not in places:
        raise ValueError(f"{document}: expected a line {BEGIN.format(path)} and a line {END}")
    text = f"{BEGIN.format(path)}\n{render(read(record))}{END}"
    old = f"{BEGIN.format(place)}\n{places[place]}{END}"
    document.write_text(before.replace(old, text, 1))


WAYS = {
    "cpu": Way({"threads": int}, lambda record: (caption(record), summary(record), memory(record)), cases),
    "gpu": Way(
        {"rounds": int, "device": dict, "left_out": list},
        lambda record: (gpu.caption(record), summary(record), *gpu.sections(record)),
        gpu.details,
    ),
    "tune": Way(
        {"rounds": int, "device": dict, "fields": list, "left_out": list},
        lambda record: (tuned.caption(record), tuned.table(record)),
        tuned.details,
    ),
    "io": Way(
        {"device": dict, "failed": dict},
        lambda record: (moved_table.caption(record), moved_table.table(record)),
        moved_table.details,
    ),
}
