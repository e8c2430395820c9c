"""How a record compares with its bars: a table with a row per group, and a list of the goals missed."""

from __future__ import annotations

from typing import Any

from flashtile.lab.bench import markdown
from flashtile.lab.bench.markdown import number
from flashtile.lab.bench.records import Record


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
