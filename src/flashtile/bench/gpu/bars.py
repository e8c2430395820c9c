"""What the measurements have to clear: a list of rows -> one line a bar, with what was found and whether it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from flashtile.bench.cases import FORWARD
from flashtile.bench.gpu.peers import CUDNN, FLEX, OURS, PORTABLE
from flashtile.bench.gpu.rows import DECODE, MEMORY, SMALL, TRAIN
from flashtile.bench.memory import BACKWARD
from flashtile.bench.timing import geometric_mean

OVER_FLEX = 1.05
SHARE_OF_COPY = 0.90
SHORT_CACHE = 8192  # with one sequence this is too little work to be measured against the copy
WINDOW = 1.3  # times what the keys in the window, and those of a tile, cost without one
TILE = 128
HOST = 40e-6
SLACK = 1 << 20  # of memory: allocations are rounded up, schedulers keep counters
SAME = 0.02  # ||ours - theirs|| / ||theirs|| in bfloat16, where each is off by a few thousandths

Row = dict[str, Any]


def judge(rows: Sequence[Row], failed: Collection[str] = ()) -> list[Row]:
    """Every bar that these rows have to do with, suite by suite, and how many rows could not be measured."""
    found: list[Row] = []
    for direction in (FORWARD, BACKWARD):
        trained = [row for row in rows if row["suite"] == TRAIN and row["direction"] == direction]
        if trained:
            found += [_against_flex(direction, trained), _against_best(direction, trained)]
            found += _portable_against_flex(direction, trained)
        found += [_window(row) for row in trained if "unwindowed" in row]
    found += _decode([row for row in rows if row["suite"] == DECODE])
    found += [_host(row) for row in rows if row["suite"] == SMALL]
    found += [_memory(row) for row in rows if row["suite"] == MEMORY]
    compared = [row for row in rows if row.get("differences")]
    if compared:
        found.append(_agreement(compared))
    if failed:
        found.append(line("failed", "rows that failed", "rows", [len(failed)], worst_bar=0))
    return found


def line(
    group: str,
    title: str,
    measure: str,
    values: Iterable[float],
    *,
    worst_bar: float | None,
    at_least: bool = False,
    failed: bool = False,
) -> Row:
    """One bar, on the worst of the values. `failed`: we could not do some row at all, so it cannot hold."""
    found = list(values)
    shared = {"group": group, "title": title, "measure": measure, "bar": None, "reach": None, "worst_bar": worst_bar}
    shared["at_least"] = at_least
    if not found:
        return {**shared, "value": None, "worst": None, "holds": False if failed else None}
    worst = min(found) if at_least else max(found)
    holds = None
    if worst_bar is not None:
        holds = not failed and (worst >= worst_bar if at_least else worst <= worst_bar)
    value = geometric_mean(found) if min(found) > 0 else sum(found) / len(found)
    return {**shared, "value": value, "worst": worst, "holds": holds}


def _without_us(rows: Iterable[Row]) -> bool:
    return any(OURS in row["absent"] for row in rows)


def _ratios(rows: Iterable[Row], peer: str) -> list[float]:
    return [row["ratios"][peer]["value"] for row in rows if peer in row["ratios"]]


def best_peer(row: Row) -> str | None:
    """The fastest of the others."""
    others = {name: ratio["value"] for name, ratio in row["ratios"].items() if name != PORTABLE}
    return min(others, key=lambda name: others[name], default=None)


def _against_flex(direction: str, rows: Sequence[Row]) -> Row:
    return line(
        f"{direction}-flex",
        f"{direction}, {len(rows)} shapes",
        f"{FLEX} time / time",
        _ratios(rows, FLEX),
        worst_bar=OVER_FLEX,
        at_least=True,
        failed=_without_us(rows),
    )


def _portable_against_flex(direction: str, rows: Sequence[Row]) -> list[Row]:
    """The same of the portable kernels, where others run by default."""
    times = [row["times"] for row in rows if PORTABLE in row["times"] and FLEX in row["times"]]
    if not times:
        return []
    values = [time[FLEX]["median_s"] / time[PORTABLE]["median_s"] for time in times]
    title = f"{direction} by Triton, {len(values)} shapes"
    return [
        line(f"{direction}-portable", title, f"{FLEX} time / time", values, worst_bar=OVER_FLEX, at_least=True),
    ]


def _against_best(direction: str, rows: Sequence[Row]) -> Row:
    values = [row["ratios"][name]["value"] for row in rows if (name := best_peer(row)) is not None]
    title = f"{direction}, {len(values)} shapes"
    return line(f"{direction}-best", title, "best peer's time / time", values, worst_bar=None, at_least=True)


def _window(row: Row) -> Row:
    """Time beside that of the same shape without a window, in units of the keys that are left to visit."""
    keys, n = row["window"] + TILE, row["shape"]["n_k"]
    values = []
    if OURS in row["times"]:
        values = [row["times"][OURS]["median_s"] / (row["unwindowed"]["median_s"] * keys / n)]
    return line(
        f"{row['direction']}-window",
        f"{row['direction']}, window {row['window']} of {n} keys",
        f"time / ({keys} / {n} of the full time)",
        values,
        worst_bar=WINDOW,
        failed=_without_us([row]),
    )


def _decode(rows: Sequence[Row]) -> list[Row]:
    long = [row for row in rows if not _short(row)]
    found = []
    if long:
        shares = [row["shares"][OURS] for row in long if OURS in row["shares"]]
        title, measure = f"decode, {len(long)} shapes", "K and V read a second / device copy"
        found.append(
            line("decode", title, measure, shares, worst_bar=SHARE_OF_COPY, at_least=True, failed=_without_us(long))
        )
    for row in rows:
        if _short(row):
            found.append(
                line(
                    "decode-short",
                    f"decode, one sequence of {row['shape']['n_k']} keys",
                    f"{CUDNN} time / time",
                    _ratios([row], CUDNN),
                    worst_bar=1.0,
                    at_least=True,
                    failed=_without_us([row]),
                )
            )
    return found


def _short(row: Row) -> bool:
    return bool(row["shape"]["batch"] == 1 and row["shape"]["n_k"] <= SHORT_CACHE)


def _host(row: Row) -> Row:
    values = [row["host"][OURS]["median_s"] * 1e6] if OURS in row["host"] else []
    return line("host", "a small call", "host time, us", values, worst_bar=HOST * 1e6, failed=_without_us([row]))


def _memory(row: Row) -> Row:
    values = [row["grown"][OURS] / (row["needed"] + SLACK)] if OURS in row["grown"] else []
    what = "delta and dQ in float32" if row["direction"] == BACKWARD else "lse"
    return line(
        f"memory-{row['direction']}",
        f"memory of {row['direction']}",
        f"peak beyond inputs and results / ({what} + {SLACK >> 20} MiB)",
        values,
        worst_bar=1.0,
        failed=_without_us([row]),
    )


def _agreement(rows: Sequence[Row]) -> Row:
    """Each row by the peer that is nearest to us: one peer that is wrong alone is not our fault."""
    nearest = [min(row["differences"].values()) for row in rows]
    return line("agreement", f"results, {len(rows)} shapes", "norm of the difference / norm", nearest, worst_bar=SAME)
