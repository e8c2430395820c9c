"""A GPU record as markdown: rates row by row, host time, memory, and the ceilings of the run."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flashtile.lab.bench import markdown
from flashtile.lab.bench.gpu.measures import OVER_BEST, best_peer
from flashtile.lab.bench.gpu.peers import NAMES, OURS, OURSELVES, WIDE
from flashtile.lab.bench.gpu.rows import DECODE, DTYPE, MEMORY, SMALL, TRAIN
from flashtile.lab.bench.markdown import number
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.tables.goals import goals, summary
from flashtile.lab.bench.timing import geometric_mean
from flashtile.numerics.dtypes import EIGHT_BITS

Row = dict[str, Any]
FIELDS: dict[str, type] = {"rounds": int, "device": dict, "failed": dict, "unfit": dict, "left_out": list}
DIRECTIONS = {"forward": "forward", "backward": "backward", "step": "a training step"}
OMITTED = {TRAIN, DECODE, SMALL, MEMORY, DTYPE, EIGHT_BITS}  # words of a case that its table's heading implies


def parts(record: Record) -> Iterable[str]:
    return caption(record), summary(record), *_sections(record)


def brief(record: Record) -> Iterable[str]:
    return f"{machine(record)}.", _speeds(record), goals(record)


def machine(record: Record) -> str:
    """The GPU and the versions."""
    d, software = record["device"], markdown.software(record["machine"], "flashtile", "torch", "triton")
    return f"{d['name']}, CUDA {d['cuda']}, cuDNN {d['cudnn']}; {software}"


def caption(record: Record) -> str:
    text = f"{machine(record)}. "
    dtypes = dict.fromkeys(row["dtype"] for row in record["measurements"])
    text += f"{' and '.join(dtypes)}, medians of {record['rounds']} rounds in random order."
    for suite, what, unit, scale in (
        (TRAIN, "An 8192^3 matrix product", "TFLOP/s", 1e-12),
        (DECODE, "A device copy", "TB/s, read and written", 1e-12),
    ):
        rates = sorted(row["ceiling"] * scale for row in _of(record, suite))
        if rates:
            text += f" {what} in the same rounds: {_range(rates)} {unit}."
    if record["left_out"]:
        text += f" Left out for lack of time: {len(record['left_out'])} rows."
    if record["absent"]:
        absent = (f"{name} ({reason.partition(': ')[0]})" for name, reason in record["absent"].items())
        text += f" Not compared: {', '.join(absent)}."
    return text


def _sections(record: Record) -> Iterable[str]:
    """The tables that this record has rows for."""
    yield _rates([row for row in _of(record, TRAIN) if row["dtype"] == DTYPE], "TFLOP/s", 0)
    yield _rates([row for row in _of(record, TRAIN) if row["dtype"] == EIGHT_BITS], f"TFLOP/s, {EIGHT_BITS}", 0)
    yield _rates(_of(record, DECODE), "TB/s of K and V", 2)
    hosts = [row for row in record["measurements"] if row.get("host")]
    yield _table("host time per call, us", hosts, lambda row: _micros(row["host"]))
    yield _table("time until the result is available, us", _of(record, SMALL), lambda row: _micros(row["times"]))
    yield _table(
        "peak memory beyond inputs and results, MiB",
        _of(record, MEMORY),
        lambda row: {name: f"{grown / 2**20:.1f}" for name, grown in row["grown"].items()},
    )


def _rates(rows: Sequence[Row], unit: str, digits: int) -> str:
    """The rates of all contenders, and ours over the best peer's, the copy's, and our own in 16 bits."""

    def cells_of(row: Row) -> dict[str, str]:
        best = best_peer(row)
        cells = {name: number(rate / 1e12, digits) for name, rate in row["rates"].items()}
        cells["/ best peer"] = "" if best is None else number(row["ratios"][best]["value"])
        if "shares" in row:
            cells["/ copy"] = number(row["shares"].get(OURS))
        if WIDE in row["ratios"]:
            cells[f"/ {DTYPE}"] = number(row["ratios"][WIDE]["value"])
        return cells

    extra = ["/ best peer", *(["/ copy"] if any("shares" in row for row in rows) else [])]
    extra += [f"/ {DTYPE}"] if any(WIDE in row["ratios"] for row in rows) else []
    return _table(unit, rows, cells_of, extra)


def details(record: Record) -> str:
    """One row per case, with the milliseconds and quartiles of all contenders."""

    def cells_of(row: Row) -> dict[str, str]:
        return {
            name: f"{t['median_s'] * 1e3:.4g} ({t['q1_s'] * 1e3:.4g} to {t['q3_s'] * 1e3:.4g})"
            for name, t in row["times"].items()
        }

    return _table("ms", [row for row in record["measurements"] if row.get("times")], cells_of)


def _table(what: str, rows: Sequence[Row], cells_of: Callable[[Row], dict[str, str]], extra: Sequence[str] = ()) -> str:
    """A table with a column for every contender that is in some row."""
    cells = [cells_of(row) for row in rows]
    names = [name for name in NAMES if any(name in each for each in cells)]
    if not names:
        return ""
    head = (what, *names, *extra)
    return markdown.table(
        [
            head,
            *((_name(row), *(each.get(name, "") for name in head[1:])) for row, each in zip(rows, cells, strict=True)),
        ]
    )


def _of(record: Record, suite: str) -> list[Row]:
    return [row for row in record["measurements"] if row["suite"] == suite]


def _name(row: Row) -> str:
    return " ".join(word for word in row["case"].split() if word not in OMITTED)


def _micros(times: dict[str, Any]) -> dict[str, str]:
    return {name: f"{t['median_s'] * 1e6:.1f}" for name, t in times.items()}


def _range(ordered: Sequence[float]) -> str:
    first, last = f"{ordered[0]:.3g}", f"{ordered[-1]:.3g}"
    return first if first == last else f"{first} to {last}"


def _speeds(record: Record) -> str:
    """One row per direction: means over the shapes that all peers ran, and the worst ratio to the fastest peer."""
    measured = [row for row in record["measurements"] if row["suite"] == TRAIN and row["dtype"] == DTYPE]
    peers = [name for name in NAMES if name not in OURSELVES and any(name in row["ratios"] for row in measured)]
    rows = []
    for direction, title in DIRECTIONS.items():
        if some := [row for row in measured if row["direction"] == direction and row["ratios"].keys() >= {*peers}]:
            means = [number(geometric_mean(row["ratios"][name]["value"] for row in some)) for name in peers]
            worst = min((x for row in some if (x := OVER_BEST.of(row)) is not None), default=None)
            rows.append((f"{title}, {len(some)} shape{'s' if len(some) > 1 else ''}", *means, number(worst, 3)))
    head = ("on a GPU, speedup over", *peers, "the fastest peer, at worst")
    return markdown.table([head, *rows]) if rows and peers else ""
