"""Run the CPU suite, every group of cases.py, then memory, then scaling, and make the record."""

from collections.abc import Callable, Collection
from typing import Any

from flashtile import dispatch
from flashtile.lab.bench import memory, records, workload
from flashtile.lab.bench.cases import CPU, FORWARD, GROUPS, MEMORY, SCALING, SCALING_BAR, Case, Group, quick
from flashtile.lab.bench.records import Record, goal
from flashtile.lab.bench.timing import Call, Ratio, Timing, alternate, geometric_mean
from flashtile.lab.bench.workload import OURS, SDPA, Workload

Progress = Callable[[str, int, int], None]  # what comes next, the number done, the total


def run(
    *,
    only: Collection[str] = (),
    short: bool = False,
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Record:
    """Measure everything, or the groups in `only`, and return the record. `short`: fewer cases, fewer rounds."""
    threads = threads or workload.default_threads()
    workload.set_threads(threads)
    wanted = only or GROUPS
    groups = [quick(group) if short else group for group in CPU if group.name in wanted]
    scaling = SCALING[:4] if short else SCALING
    total = sum(len(group.cases) for group in groups)
    total += len(scaling) * ("scaling" in wanted) + 2 * ("memory" in wanted)

    record = records.new("cpu", short, threads=threads)
    record["absent"] = workload.absent()
    measured = record["measurements"]

    def measure(group: str, case: Case, **more: Any) -> dict[str, Any]:
        progress(f"{group}: {case.name}", len(measured), total)
        row = _timed(group, case, threads, 0.5 if short else 3.0, **more)
        measured.append(row)
        return row

    for group in groups:
        record["summary"].append(_summary(group, [measure(group.name, case) for case in group.cases]))
    if "memory" in wanted:
        rows = []
        for direction in (FORWARD, memory.BACKWARD):
            progress(f"memory: {direction}", len(measured), total)
            rows.append(_grown(direction, threads))
            measured.append(rows[-1])
        record["summary"].append(_memory_summary(rows))
    if "scaling" in wanted:
        rows = [measure("scaling", case, ours_alone=True) for case in scaling]
        record["summary"].append(_scaling_summary(rows))
    progress("done", total, total)
    return record


def time_all(calls: dict[str, Call], seconds: float, **more: Any) -> dict[str, Timing]:
    """Time ours and SDPA in turns, then each naive one alone, because NumPy's BLAS keeps cores spinning."""
    times = alternate({name: call for name, call in calls.items() if name in (OURS, SDPA)}, seconds=seconds, **more)
    for name, call in calls.items():
        if name not in times:
            times |= alternate({name: call}, seconds=seconds / 3)
    return times


def _timed(group: str, case: Case, threads: int, seconds: float, ours_alone: bool = False) -> dict[str, Any]:
    work = Workload(case, threads)
    beside = case.beside_torch and not workload.absent()
    times = time_all(
        workload.contenders(work, ours_alone=ours_alone),
        seconds,
        warm_up=1 if case.n_q > 1024 else 3,
        before=workload.torch_work() if beside else None,
    )
    planned = case.plan()
    flops = planned.flops + (planned.backward_flops if work.training else 0)
    row: dict[str, Any] = {"group": group, **case.to_dict(), "backend": planned.backend, "flops": flops}
    row["times"] = {name: timing.to_dict() for name, timing in times.items()}
    row["gflops"] = flops / times[OURS].median / 1e9
    if SDPA in times:
        ratio = Ratio.of(times[OURS], times[SDPA])
        row |= {"ratio": ratio.value, "ratio_q1": ratio.q1, "ratio_q3": ratio.q3}
    return row


def _grown(direction: str, threads: int) -> dict[str, Any]:
    """The memory growth of a fresh process, with ours and with SDPA."""
    row: dict[str, Any] = {"group": "memory", **MEMORY.to_dict(), "direction": direction, "grown": {}}
    able = (row for row in dispatch.TABLE if row.missing() is None and not (row.tensors_only and workload.absent()))
    row["backend"] = next(able).name
    if not workload.absent():
        row["grown"] = {name: memory.growth(name, MEMORY, direction, threads) for name in (OURS, SDPA)}
    elif direction == FORWARD:
        row["grown"] = {OURS: memory.growth(memory.OURS_NUMPY, MEMORY, direction, threads)}
    if all(row["grown"].get(name) for name in (OURS, SDPA)):
        row["ratio"] = row["grown"][OURS] / row["grown"][SDPA]
    return row


def _summary(group: Group, rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    summary = goal(group.name, group.title, "time / SDPA time", group.bar, worst_bar=group.worst_bar)
    summary["reach"] = group.reach
    if not ratios:
        return summary
    value, worst = geometric_mean(ratios), max(ratios)
    holds = value <= group.bar and (group.worst_bar is None or worst <= group.worst_bar)
    return summary | {"value": value, "worst": worst, "holds": holds}


def _memory_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    title = f"peak memory, {MEMORY.name}, the larger of both passes"
    summary = goal("memory", title, "growth / SDPA growth", 1.0, worst_bar=1.0)
    return summary | {"value": max(ratios), "worst": max(ratios), "holds": max(ratios) < 1} if ratios else summary


def _scaling_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [row["gflops"] for row in rows]
    drop = 1 - min(rates) / max(rates)
    first, last = rows[0]["shape"]["n_q"], rows[-1]["shape"]["n_q"]
    summary = goal("scaling", f"GFLOP/s from N = {first} to {last}", "slowest below fastest", SCALING_BAR)
    return summary | {"value": drop, "worst": drop, "holds": drop <= SCALING_BAR}
