"""Render the page: a pure function of the content of a run and its drawings."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from flashtile.lab.bench.workload import OURS, SDPA
from flashtile.lab.report import mathml, palette, tables, viewer
from flashtile.lab.report.content import Content
from flashtile.lab.report.figures import Drawing
from flashtile.lab.studies import speed
from flashtile.lab.studies.study import SEED
from flashtile.lab.units import quantity, seconds, size

if TYPE_CHECKING:
    from jinja2 import Environment


class Section(NamedTuple):
    """A part of the page: its id, which is also the name of its template, and its heading."""

    id: str
    title: str


SECTIONS = (
    Section("problem", "The problem: a table of N by N"),
    Section("viewer", "Watch the tiles"),
    Section("trick", "The trick: softmax without the whole row"),
    Section("traffic", "Why it is faster: fewer trips through memory"),
    Section("studies", "The studies"),
    Section("speed", "Speed, and how busy the machine is"),
    Section("backward", "Training: the backward pass stores nothing either"),
    Section("versions", "FlashAttention 1, 2 and 3: one principle"),
    Section("serving", "Long contexts: the cache, grouped heads, many GPUs"),
    Section("lives", "Where it is used"),
    Section("lessons", "Lessons: from two vectors to a kernel"),
    Section("gpu", "What needs a GPU, and what does not"),
    Section("questions", "Can you answer these?"),
    Section("recap", "In short"),
    Section("run", "About this run"),
)
MATHS: dict[str, Callable[..., str]] = {"equation": mathml.equation, "eq": mathml.reference, "formula": mathml.formula}
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def render(content: Content, drawings: dict[str, Drawing]) -> str:
    """Return the whole page. `drawings` maps the name of a study to its drawing, if it has one."""
    shown = {r.study.name: replace(r, drawing=drawings.get(r.study.name)) for r in content.results}
    timed = shown["speed"].record
    fastest = speed.longest(timed.sides[-1])
    gpus = [device["name"] for device in content.devices if device["device"] != "cpu"]
    return str(
        environment()
        .get_template("page.html.j2")
        .render(
            palette=palette.css(),
            style=files("flashtile.lab.report").joinpath("style.css").read_text(),
            sections=SECTIONS,
            viewer=viewer.fragment(content.scenes),
            quick=content.quick,
            created=content.created.replace("T", " ").replace("+00:00", " UTC"),
            machine=content.machine,
            threads=timed.threads,
            gpu=", ".join(gpus),
            seed=SEED,
            studies=shown,
            lessons=content.lessons,
            lesson={result.lesson.name: result for result in content.lessons},
            best=fastest.runs[OURS],
            standard=fastest.runs[speed.standard_of(fastest)],
            ratio=_ratio(timed),
            broken=content.broken,
            available=tables.available(content),
            needed=tables.needed(content),
            versions=tables.versions(content),
        )
    )


def environment() -> "Environment":
    """Return the templates of this folder with their filters and functions. An undefined name is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(str(files("flashtile.lab.report")))
    env = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.filters |= {"size": size, "seconds": seconds, "quantity": quantity, "number": "{:,}".format}
    env.filters |= {"spelled": spelled, "by": by, "counted": counted, "kinds": tables.kinds}
    env.globals |= {
        **{name: _markup(function) for name, function in MATHS.items()},
        "followed": tables.followed,
        "launched": tables.launched,
        "ordered": tables.ordered,
        "worked": tables.worked,
    }
    return env


def _markup(function: Callable[..., str]) -> Callable[..., str]:
    """Mark what a function returns as safe HTML."""
    from markupsafe import Markup

    return lambda *given: Markup(function(*given))


def spelled(n: int) -> str:
    """Spell out small numbers."""
    return WORDS[n] if n < len(WORDS) else f"{n:,}"


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def by(values: Iterable[Any], name: str) -> dict[Any, Any]:
    """Index values by one of their attributes."""
    return {getattr(value, name): value for value in values}


def _ratio(record: Any) -> str | None:
    """Our time over SDPA's, as a range over all cases; None without torch."""
    ratios = [
        row.runs[OURS].seconds / row.runs[SDPA].seconds
        for side in record.sides
        for row in side.rows
        if SDPA in row.runs
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else None
