"""Records as markdown: reads records, and writes the tables of README and docs."""

import re
from collections.abc import Callable, Iterable
from os.path import relpath
from pathlib import Path
from typing import NamedTuple, Protocol

from flashtile.lab.bench import markdown, records
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.tables import cpu, gpu, io, masks, tune

WHOLE, BRIEF = "bench", "brief"  # the marks of places in documents: for all tables of a record, or a brief
_MARKED = re.compile(
    rf"<!-- (?P<kind>{WHOLE}|{BRIEF}): (?P<path>[^\n>]*?) -->\n(?P<body>.*?)<!-- end of (?P=kind) -->", re.DOTALL
)


class Tables(Protocol):
    """What a module of tables/ has: how the records of one suite look."""

    FIELDS: dict[str, type]  # those such a record has beside the common ones

    def parts(self, record: Record) -> Iterable[str]:
        """What a document shows."""

    @property
    def brief(self) -> Callable[..., Iterable[str]]:
        """What a document shows in brief, of one record or, on a CPU, of several."""

    def details(self, record: Record) -> str:
        """One row per measurement."""


SUITES: dict[str, Tables] = {"cpu": cpu, "gpu": gpu, "tune": tune, "io": io, "masks": masks}


def read(path: Path) -> Record:
    """Read a record that can be shown, or raise a ValueError that names the file."""
    record = records.read(path)
    if record["suite"] not in SUITES:
        raise ValueError(f"{path}: expected a record of the suite {' or '.join(SUITES)}, got {record['suite']!r}")
    records.check_fields(record, SUITES[record["suite"]].FIELDS, path)
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
    """The place of a record in a document, by its path; "" before the first. A brief may have several paths."""

    kind: str
    path: str
    body: str

    def __str__(self) -> str:
        return f"<!-- {self.kind}: {self.path} -->\n{self.body}<!-- end of {self.kind} -->"


def render(record: Record, kind: str = WHOLE, *more: Record) -> str:
    """Render what documents show of a record, or in brief of several."""
    suite, found = SUITES[record["suite"]], [markdown.plain(each) for each in (record, *more)]
    parts = suite.brief(*found) if kind == BRIEF else suite.parts(found[0])
    return "\n\n".join(part for part in parts if part) + "\n"


def details(record: Record) -> str:
    """Render one row per measurement."""
    return SUITES[record["suite"]].details(markdown.plain(record))


def marked(text: str) -> list[Place]:
    """The places of a document."""
    return [Place(found["kind"], found["path"], found["body"]) for found in _MARKED.finditer(text)]


def put_into(document: Path, record: Path) -> None:
    """Renew what a document shows of this record, or put it into an empty place. Paths are relative to the document."""
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
