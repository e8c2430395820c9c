"""A CPU record as markdown: the caption, times of each case, and peak memory."""

from collections.abc import Callable, Iterable
from typing import Any

from flashtile.lab.bench import markdown
from flashtile.lab.bench.markdown import milliseconds, number
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.tables.goals import goals, summary

FIELDS: dict[str, type] = {"threads": int}
BRIEFLY = ("full", "causal", "training", "training-causal", "bfloat16", "bfloat16-training", "decode-gqa", "small")


def parts(record: Record) -> Iterable[str]:
    return caption(record), summary(record), _memory(record)


def brief(*found: Record) -> Iterable[str]:
    return _captions(*found), _speeds(*found), goals(found[0]) if len(found) == 1 else ""


def details(record: Record) -> str:
    return times(record, {"ratio": lambda m: number(m.get("ratio")), "GFLOP/s": lambda m: number(m.get("gflops"), 0)})


def times(record: Record, more: dict[str, Callable[[dict[str, Any]], str]]) -> str:
    """One row per case, with the times of all contenders; `more`: heads of further columns, and their cells."""
    measured = [m for m in record["measurements"] if "times" in m]
    names = list(dict.fromkeys(name for m in measured for name in m["times"]))
    rows = [("group", "case", "direction", *(f"{name}, ms" for name in names), *more)]
    for m in measured:
        taken = (milliseconds(m["times"].get(name)) for name in names)
        rows.append((m["group"], m["case"], m["direction"], *taken, *(cell(m) for cell in more.values())))
    return markdown.table(rows)


def _memory(record: Record) -> str:
    """One row per pass, with the memory growth of a process."""
    rows: list[tuple[str, ...]] = [("case", "pass", "flashtile, MiB", "torch SDPA, MiB")]
    for m in record["measurements"]:
        if "grown" in m:
            grown = [m["grown"].get(name) for name in ("flashtile", "torch SDPA")]
            rows.append((m["case"], m["direction"], *("" if g is None else f"{g / 2**20:.1f}" for g in grown)))
    return markdown.table(rows) if len(rows) > 1 else ""


def caption(record: Record) -> str:
    m = record["machine"]
    software = markdown.software(m, "flashtile", "torch", "numpy")
    return f"{m['processor']}, {m['isa'] or 'no C++ core'}, {record['threads']} threads; {software}."


def _captions(*found: Record) -> str:
    """The caption of one record, or a list for several, each with its number of goals reached."""
    if len(found) == 1:
        return caption(found[0])
    return "\n".join(f"- {caption(record)} {goals(record).partition(' Not yet')[0]}" for record in found)


def _speeds(*found: Record) -> str:
    """One row for each of the most informative groups, with the range over the records."""
    rows = []
    for name in BRIEFLY:
        group = [s for record in found for s in record["summary"] if s["group"] == name and s["value"]]
        if group:
            ends = [number(1 / of(s["value"] for s in group), 1) for of in (max, min)]
            rows.append((group[0]["title"], " to ".join(dict.fromkeys(ends))))
    return markdown.table([("on a CPU", "speedup over torch's SDPA"), *rows]) if rows else ""
