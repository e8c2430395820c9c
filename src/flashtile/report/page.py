"""The page as text: a pure function of the content of a run and its drawings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from flashtile.bench.peers import OURS, SDPA
from flashtile.report import mathml, palette, viewer
from flashtile.report.content import Content, Result, Told
from flashtile.report.figures import Drawing
from flashtile.report.topics import speed
from flashtile.studies.study import SEED, Table
from flashtile.units import quantity, seconds, size

if TYPE_CHECKING:
    from jinja2 import Environment


class Section(NamedTuple):
    """A part of the page: its id, which is also the name of its template, and its heading."""

    id: str
    title: str


SECTIONS = (
    Section("problem", "What hurts: a table of N by N"),
    Section("viewer", "Watch the tiles"),
    Section("trick", "The trick: softmax without the whole row"),
    Section("traffic", "Why it is faster: fewer trips through memory"),
    Section("studies", "The studies"),
    Section("speed", "Speed, and how busy the machine is"),
    Section("backward", "Training: the backward pass stores nothing either"),
    Section("versions", "FlashAttention 1, 2 and 3: one principle"),
    Section("serving", "Long contexts: the cache, grouped heads, many GPUs"),
    Section("lives", "Where it lives"),
    Section("lessons", "Lessons: from two vectors to a kernel"),
    Section("gpu", "What needs a GPU, and what does not"),
    Section("questions", "Can you answer these?"),
    Section("recap", "In short"),
    Section("run", "About this run"),
)
_NUMBER = re.compile(r"[-+]?\d|(none|not said)?$")
MATHS: dict[str, Callable[..., str]] = {"equation": mathml.equation, "eq": mathml.reference, "formula": mathml.formula}
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def render(content: Content, drawings: dict[str, Drawing]) -> str:
    """The whole page. `drawings` has one for each result, by the name of its study."""
    shown = {result.study.name: Shown(result, drawings[result.study.name]) for result in content.results}
    topics = {result.study.name: shown[result.study.name] for result in content.topics}
    side = topics["speed"].record.sides[-1]
    fastest = speed.longest(side)
    gpus = [device["name"] for device in content.devices if device["device"] != "cpu"]
    return str(
        environment()
        .get_template("page.html.j2")
        .render(
            palette=palette.css(),
            style=_text("style.css"),
            sections=SECTIONS,
            viewer=viewer.fragment(content.scenes),
            quick=content.quick,
            created=content.created.replace("T", " ").replace("+00:00", " UTC"),
            machine=content.machine,
            threads=topics["speed"].record.threads,
            gpu=", ".join(gpus),
            seed=SEED,
            studies=[shown[result.study.name] for result in content.studies],
            equivalence=shown["equivalence"].record,
            topic=topics,
            arithmetic=topics["arithmetic"],
            lessons=content.lessons,
            lesson={told.lesson.name: told for told in content.lessons},
            best=fastest.runs[OURS],
            standard=fastest.runs[speed.standard_of(fastest)],
            ratio=_ratio(topics["speed"].record),
            broken=content.broken,
            available=_available(content),
            needed=_needed(content),
            versions=_versions(content),
        )
    )


class Shown:
    """A result with its drawing, as the templates take it."""

    def __init__(self, result: Result, drawing: Drawing) -> None:
        self.study, self.record, self.drawing = result.study, result.record, drawing
        self.tables, self.findings = result.tables, result.findings


def environment() -> Environment:
    """The templates of this folder, and what they may call. A name that is not there is an error, not empty text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(str(files("flashtile.report")))
    env = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.filters |= {"size": size, "seconds": seconds, "quantity": quantity, "number": "{:,}".format}
    env.filters |= {"words": words, "by": by, "counted": counted, "kinds": kinds}
    env.globals |= {
        **{name: _markup(function) for name, function in MATHS.items()},
        "followed": followed,
        "launched": launched,
        "ordered": ordered,
        "worked": worked,
    }
    return env


def _markup(function: Callable[..., str]) -> Callable[..., str]:
    """What it returns is markup already."""
    from markupsafe import Markup

    return lambda *given: Markup(function(*given))


def words(n: int) -> str:
    """Small numbers as words."""
    return WORDS[n] if n < len(WORDS) else f"{n:,}"


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def by(values: Iterable[Any], name: str) -> dict[Any, Any]:
    """Values by one of their attributes."""
    return {getattr(value, name): value for value in values}


def followed(row: dict[str, Any]) -> Table:
    """One token through its tiles, from the record of the lesson online-softmax."""
    names = ("max", "m", "factor", "sum", "l", "o")
    return Table(
        "One row of scores, a tile at a time",
        ("keys", "largest here", "m", "factor", "sum here", "l", "O, first number"),
        tuple(
            (f"{n * row['tile']} to {(n + 1) * row['tile'] - 1}", *(f"{step[name]:.4f}" for name in names))
            for n, step in enumerate(row["steps"])
        ),
    )


def worked(record: Any) -> Table:
    """All worked examples in one table, from the record of the study of arithmetic."""
    rows = []
    for example in record.examples:
        lines = [(part.what, part.sum, part.result) for part in example.lines]
        if sum(part.dtype is not None for part in example.lines) > 1:
            lines.append(("together", "", f"{example.total:,} B = {size(example.total)}"))
        rows += [("" if n else example.title, *line) for n, line in enumerate(lines)]
    return Table("Worked out", ("example", "what", "sum", "result"), tuple(rows))


def kinds(table: Table) -> list[str]:
    """For each column whether it holds numbers, which line up on the right, or words."""
    columns: Iterable[tuple[str, ...]] = zip(*table.rows, strict=True) if table.rows else [()] * len(table.head)
    _, *others = ("number" if all(_NUMBER.match(cell) for cell in column) else "words" for column in columns)
    return ["words", *others]  # the first column says what a row is


def launched(counted: dict[str, Any]) -> Table:
    """Every launch and what it moved, from the record of the lesson launches."""
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
    """FA1 beside FA2, from the record of the lesson fa1-vs-fa2."""
    fa1, fa2 = orders["moved"]["fa1"], orders["moved"]["fa2"]
    exchanged = [f"{way['exchanged']:,}" for way in orders["warps"].values()]
    return Table(
        "The two orders, counted",
        ("what", "FA1", "FA2"),
        (
            ("read", size(fa1["read"]), size(fa2["read"])),
            ("written", size(fa1["written"]), size(fa2["written"])),
            ("writes of a block of O", str(fa1["writes_of_a_block"]), str(fa2["writes_of_a_block"])),
            ("walks that can go side by side, a head", str(fa1["independent"]), str(fa2["independent"])),
            ("numbers that warps exchange", *exchanged),
        ),
    )


def _ratio(record: Any) -> str | None:
    """Our time over SDPA's, the range of all cases; None where torch was not there."""
    ratios = [
        row.runs[OURS].seconds / row.runs[SDPA].seconds
        for side in record.sides
        for row in side.rows
        if SDPA in row.runs
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else None


def _available(content: Content) -> Table:
    return Table(
        "The ways to compute, on this machine",
        ("backend", "device", "here"),
        tuple((row["backend"], row["device"], row["why_not"] or "ready") for row in content.backends),
    )


def _needed(content: Content) -> Table:
    """For each lesson what it uses and how it ran."""
    return Table(
        "The lessons, on this machine",
        ("lesson", "uses beyond NumPy", "here"),
        tuple(
            (
                told.lesson.title,
                ", ".join(told.lesson.needs) or "nothing",
                told.reason or _ran(told),
            )
            for told in content.lessons
        ),
    )


def _ran(told: Told) -> str:
    where = {"cuda": "ran on the GPU", "cpu": "ran, its kernel interpreted on the CPU"}
    return where.get(told.record.get("device", ""), "ran")


def _versions(content: Content) -> Table:
    found = content.machine["versions"]
    rows = [(name, version or "not installed") for name, version in found.items()]
    rows += [("processor", content.machine["processor"]), ("instruction set", content.machine["isa"] or "no C++ core")]
    rows += [("system", content.machine["system"]), ("commit", content.machine["commit"] or "not in a checkout")]
    return Table("What it ran on", ("what", "which"), tuple(rows))


def _text(name: str) -> str:
    return files("flashtile.report").joinpath(name).read_text()
