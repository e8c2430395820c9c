"""Records as markdown: the tables of README and docs are made here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from os.path import relpath
from pathlib import Path
from typing import Any, NamedTuple

from flashtile.lab.bench import brief, markdown, records, tuned
from flashtile.lab.bench.gpu import moved_table
from flashtile.lab.bench.gpu import table as gpu
from flashtile.lab.bench.markdown import milliseconds, number
from flashtile.lab.bench.records import Record

WHOLE, BRIEF = "bench", "brief"  # how a place in a document is marked: for all tables of a record, or for its brief
_MARKED = re.compile(
    rf"<!-- (?P<kind>{WHOLE}|{BRIEF}): (?P<path>[^\n>]*?) -->\n(?P<body>.*?)<!-- end of (?P=kind) -->", re.DOTALL
)


class Way(NamedTuple):
    """How the records of a suite are shown."""

    fields: dict[str, type]  # what such a record has beside what all have
    parts: Callable[[Record], Iterable[str]]
    details: Callable[[Record], str]
    brief: Callable[..., Iterable[str]]  # of one record or several


def read(path: Path) -> Record:
    """A record that can be shown; else a ValueError that names the file."""
    record = records.read(path)
    if record["suite"] not in WAYS:
        raise ValueError(f"{path}: expected a record of the suite {' or '.join(WAYS)}, got {record['suite']!r}")
    records.demand_fields(record, WAYS[record["suite"]].fields, path)
    try:
        for kind in (WHOLE, BRIEF):
            render(record, kind)
        details(record)
    except KeyError as error:
        raise ValueError(f"{path}: expected a whole record, found no {error} in it") from None
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a record that can be shown, got one with a wrong value: {error}") from None
    return record


class Place(NamedTuple):
    """Where a document shows a record, by its path; "" waits for its first one. A brief may be one of several."""

    kind: str
    path: str
    body: str

    def __str__(self) -> str:
        return f"<!-- {self.kind}: {self.path} -->\n{self.body}<!-- end of {self.kind} -->"


def render(record: Record, kind: str = WHOLE, *more: Record) -> str:
    """What documents show of a record, or in brief of several."""
    way, found = WAYS[record["suite"]], [markdown.plain(each) for each in (record, *more)]
    parts = way.brief(*found) if kind == BRIEF else way.parts(found[0])
    return "\n\n".join(part for part in parts if part) + "\n"


def details(record: Record) -> str:
    """One row a measurement."""
    return WAYS[record["suite"]].details(markdown.plain(record))


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


def goals(record: Record) -> str:
    """How many bars hold, and which do not."""
    asked = [s for s in record["summary"] if s["holds"] is not None]
    missed = [s for s in asked if not s["holds"]]
    said = [f"{len(asked) - len(missed)} of {len(asked)} goals are reached." + (" Not yet:\n" if missed else "")]
    for s in missed:
        mean, worst = _beside(s["value"], s["bar"]), _beside(s["worst"], s["worst_bar"])
        found = f"mean {mean}, worst {worst}" if mean != worst else mean
        said.append(f"- {s['title']}: {s['measure']} {found}; goal: {_bar(s)}")
    return "\n".join(said)


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


def captions(*found: Record) -> str:
    """Of one record; of several a list, with how many goals each of them reaches."""
    if len(found) == 1:
        return caption(found[0])
    return "\n".join(f"- {caption(record)} {goals(record).partition(' Not yet')[0]}" for record in found)


def marked(text: str) -> list[Place]:
    """The places of a document."""
    return [Place(found["kind"], found["path"], found["body"]) for found in _MARKED.finditer(text)]


def put_into(document: Path, record: Path) -> None:
    """Make what a document shows of this record anew, or put it where a place waits.

    Its path is relative to the document.
    """
    path = Path(relpath(record.resolve(), document.resolve().parent)).as_posix()
    text = document.read_text()
    places = marked(text)
    own = [place for place in places if path in place.path.split()] or [p for p in places if not p.path][:1]
    if not own:
        raise ValueError(f"{document}: expected a line <!-- {WHOLE}: {path} --> and a line <!-- end of {WHOLE} -->")
    for place in own:
        paths = place.path or path
        first, *others = (read(document.parent / each) for each in paths.split())
        text = text.replace(str(place), str(Place(place.kind, paths, render(first, place.kind, *others))), 1)
    document.write_text(text)


WAYS = {
    "cpu": Way(
        {"threads": int},
        lambda record: (caption(record), summary(record), memory(record)),
        cases,
        lambda *found: (captions(*found), brief.cpu(*found), goals(found[0]) if len(found) == 1 else ""),
    ),
    "gpu": Way(
        {"rounds": int, "device": dict, "failed": dict, "unfit": dict, "left_out": list},
        lambda record: (gpu.caption(record), summary(record), *gpu.sections(record)),
        gpu.details,
        lambda record: (f"{gpu.machine(record)}.", brief.gpu(record), goals(record)),
    ),
    "tune": Way(
        {"rounds": int, "device": dict, "fields": list, "left_out": list},
        lambda record: (tuned.caption(record), tuned.table(record)),
        tuned.details,
        lambda record: (tuned.caption(record),),
    ),
    "io": Way(
        {"device": dict, "failed": dict},
        lambda record: (moved_table.caption(record), moved_table.table(record)),
        moved_table.details,
        lambda record: (moved_table.caption(record),),
    ),
}
