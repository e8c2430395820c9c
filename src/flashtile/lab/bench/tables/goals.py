"""How a record compares with its bars: a table with a row per group, and a list of the goals missed."""

from typing import Any

from flashtile.lab.bench import markdown
from flashtile.lab.bench.markdown import number
from flashtile.lab.bench.records import Record


def summary(record: Record) -> str:
    """One row per group, compared with its bar."""
    rows: list[tuple[str, ...]] = [("what", "measure", "mean", "worst", "bar", "holds")]
    for s in record["summary"]:
        holds = {True: "yes", False: "no", None: "not measured"}[s["holds"]]
        if s["bar"] is None and s["worst_bar"] is None:
            holds = ""
        mean, worst = _against(s["value"], s["bar"]), _against(s["worst"], s["worst_bar"])
        rows.append((s["title"], s["measure"], mean, worst, _bar(s), holds))
    return markdown.table(rows)


def goals(record: Record) -> str:
    """The number of goals reached, and a list of those missed."""
    measured = [s for s in record["summary"] if s["holds"] is not None]
    missed = [s for s in measured if not s["holds"]]
    lines = [f"{len(measured) - len(missed)} of {len(measured)} goals are reached." + (" Not yet:\n" if missed else "")]
    for s in missed:
        mean, worst = _against(s["value"], s["bar"]), _against(s["worst"], s["worst_bar"])
        found = f"mean {mean}, worst {worst}" if mean != worst else mean
        lines.append(f"- {s['title']}: {s['measure']} {found}; goal: {_bar(s)}")
    return "\n".join(lines)


def _against(x: float | None, bar: float | None) -> str:
    """Format a number for comparison with its bar, with one more digit if they would look equal."""
    short = number(x)
    return number(x, 3) if x != bar and short == number(bar) else short


def _bar(s: dict[str, Any]) -> str:
    """The bar on the mean, and on the worst if it differs."""
    parts = [] if s["bar"] is None else [number(s["bar"])]
    if s["worst_bar"] not in (None, s["bar"]):
        parts.append(f"none {'under' if s.get('at_least') else 'over'} {number(s['worst_bar'])}")
    return ", ".join(parts)
