"""Run: one order of one scene as a record: events, sentences, counters, contents of SRAM, numbers of each row."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flashtile.band import Kind
from flashtile.cost import traffic
from flashtile.cost.trace import Step, Trace
from flashtile.lab.report.viewer import sentences
from flashtile.lab.report.viewer.scene import Scene
from flashtile.numerics.dtypes import ITEMSIZE, Array, accumulator
from flashtile.numerics.schedule import Event, Launch, Load, Make, Store, Tile, Zero

COUNTERS = ("moved", "read", "written", "flops", "launches", "sram", "peak", "writes")  # sizes in bytes
BLOCKS = (*"QKV", "dO", "O", *"SP", "dP", "dS", "dQ", "dK", "dV", *"LDml", "factor")  # in order of display
DIGITS = 6  # of each number in a record

Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Lists by step have an entry for 0 events done, for 1, and so on."""

    order: str
    grid: dict[str, int]
    events: list[list[Any]]  # by event: its kind, then its operands; a Store also says how often
    captions: list[str]  # by step
    counts: list[list[int]]  # by step, in the order of COUNTERS
    names: list[str]  # of the blocks that are in SRAM at any time
    sram: list[list[int]]  # by step: bytes of each of `names`
    held: list[list[int]]  # by step: the block of each of `names`, -1 for none or for a tile's own
    numbers: dict[str, Numbers]  # by event: the numbers of every row of its block
    closed: int  # bytes, by the closed form


def record(scene: Scene, trace: Trace, exact: dict[str, Array]) -> Run:
    """Record everything the page needs to replay a trace; the page computes nothing."""
    fold = traffic.Traffic(trace.grid, scene.layout)
    size = ITEMSIZE[accumulator(scene.layout.dtype)]  # of an element in SRAM: widened when it is read
    times: Counter[Event] = Counter()
    held: dict[str, int] = {}
    events, captions, counts = [], [sentences.START], [[0] * len(COUNTERS)]
    sram: list[dict[str, int]] = [{}]
    where: list[dict[str, int]] = [{}]
    for step in trace:
        before = fold.bytes
        fold.see(step.event)
        times[step.event] += 1
        events.append(_listed(step.event, times[step.event]))
        _hold(held, step.event)
        moved = fold.bytes - before
        captions.append(sentences.caption(step.event, trace.grid, trace.visible, moved, times[step.event]))
        sram.append({name: n * size for name, n in fold.sram.items()})
        inside = sum(fold.sram.values()) * size, fold.peak_sram * size
        writes = sum(n for e, n in times.items() if isinstance(e, Store) and e.name in ("O", "dQ"))
        hbm = fold.bytes, fold.loaded_bytes, fold.stored_bytes
        counts.append([*hbm, fold.flops, fold.launches, *inside, writes])
        where.append(dict(held))
    names = [name for name in BLOCKS if any(name in at for at in sram)]
    return Run(
        order=trace.order,
        grid=asdict(trace.grid),
        events=events,
        captions=captions,
        counts=counts,
        names=names,
        sram=[[at.get(name, 0) for name in names] for at in sram],
        held=[[at.get(name, -1) for name in names] for at in where],
        numbers=_numbers(trace, exact),
        closed=closed_form(scene, trace.order),
    )


def closed_form(scene: Scene, order: str) -> int:
    """Bytes through HBM, by the formulas of traffic.py."""
    grid, layout = scene.grid, scene.layout
    shape = grid.n_q, grid.n_k, layout.dim, layout.dim_v, grid.br, grid.bc, scene.visible
    elements = {
        "standard": lambda: traffic.standard_elements(grid.n_q, layout.dim, grid.n_k, layout.dim_v),
        "fa1": lambda: traffic.fa1_visible_elements(*shape),
        "fa2": lambda: traffic.fa2_elements(*shape),
        "backward": lambda: traffic.backward_elements(*shape),
    }
    return elements[order]() * ITEMSIZE[layout.dtype]


def _hold(held: dict[str, int], event: Event) -> None:
    """Update which block of each array is in SRAM after the event."""
    match event:
        case Load(name, n) | Make(name, n):
            held[name] = n
        case Zero(name, n):
            held.update(dict.fromkeys(("O", "m", "l") if name == "O" else (name,), n))
        case Launch():
            held.clear()


def _listed(event: Event, times: int) -> list[Any]:
    """The kind of an event, and its operands."""
    match event:
        case Tile(i, j, kind):
            return ["Tile", i, j, kind.name.lower()]
        case Store(name, n):
            return ["Store", name, n, times]
        case Launch(name):
            return ["Launch", name]
        case Load(name, n) | Zero(name, n) | Make(name, n):
            return [type(event).__name__, name, n]


def _numbers(trace: Trace, exact: dict[str, Array]) -> dict[str, Numbers]:
    if trace.order == "standard":
        return {str(at): _of_rows(trace, step, exact) for at, step in enumerate(trace) if isinstance(step.event, Make)}
    of_tile = _of_gradient if trace.order == "backward" else _of_state
    running: dict[int, Numbers] = {}
    found: dict[str, Numbers] = {}
    loaded: dict[str, Array] = {}
    for at, step in enumerate(trace):
        if isinstance(step.event, Tile):
            running[step.event.i] = of_tile(trace, step, exact, running.get(step.event.i), loaded)
            found[str(at)] = plain(running[step.event.i])
        else:
            loaded |= step.numbers
    return found


def _of_rows(trace: Trace, step: Step, exact: dict[str, Array]) -> Numbers:
    """Whole rows of S, P or O, as standard attention computes them."""
    assert isinstance(step.event, Make)
    name, rows = step.event.name, trace.grid.rows(step.event.n)
    x = step.numbers[name]
    found: Numbers = plain({"out": x, "error": largest_error(x, exact["out"][rows])} if name == "O" else {name: x})
    return found


def _of_state(
    trace: Trace, step: Step, exact: dict[str, Array], before: Numbers | None, loaded: dict[str, Array]
) -> Numbers:
    """m, l and O of a block of rows before and after a tile, and the error of O / l."""
    event, now = _tile(step), step.numbers
    rows, cols = trace.grid.rows(event.i), trace.grid.cols(event.j)
    out = now["O"] / np.where(now["l"] == 0, 1, now["l"])[:, None]
    m_old = np.full_like(now["m"], -np.inf) if before is None else before["m"]
    l_old = np.zeros_like(now["l"]) if before is None else before["l"]
    hidden = np.isneginf(now["S"]).all(axis=1)
    rises = now["m"] > m_old
    case = np.where(hidden, "hidden", np.where(np.isneginf(m_old), "first", np.where(rises, "bigger", "same")))
    return {
        **{name: now[name] for name in ("S", "P", "factor", "m", "l")},
        "m_old": m_old,
        "l_old": l_old,
        "key": cols.start + now["S"].argmax(axis=1),
        "case": case,
        "out": out,
        "error": largest_error(out, exact["out"][rows]),
    }


def _of_gradient(
    trace: Trace, step: Step, exact: dict[str, Array], before: Numbers | None, loaded: dict[str, Array]
) -> Numbers:
    """The weights of a tile, recomputed from L, and dQ of its rows so far."""
    event, now = _tile(step), step.numbers
    rows = trace.grid.rows(event.i)
    return {
        **{name: now[name] for name in ("S", "P", "dP", "dS")},
        "L": loaded["L"],
        "D": loaded["D"],
        "sum": now["P"].sum(axis=1) + (0 if before is None else before["sum"]),
        "case": np.where(np.isneginf(now["S"]).all(axis=1), "unseen", "recomputed"),
        "out": now["dQ"],
        "error": largest_error(now["dQ"], exact["dq"][rows]),
    }


def _tile(step: Step) -> Tile:
    assert isinstance(step.event, Tile) and step.event.kind is not Kind.SKIPPED
    return step.event


def largest_error(x: Array, exact: Array) -> Array:
    """The largest error of each row."""
    error: Array = np.abs(x.astype(np.float64) - exact).max(axis=1)
    return error


def plain(x: Any) -> Any:
    """Convert to lists, strings and short numbers; non-finite numbers become "inf", "-inf" or "nan"."""
    if isinstance(x, dict):
        return {name: plain(y) for name, y in x.items()}
    if isinstance(x, np.ndarray):
        return plain(x.tolist())
    if isinstance(x, (list, tuple)):
        return [plain(y) for y in x]
    if isinstance(x, float):
        if not np.isfinite(x):
            return str(x)
        x = float(f"{x:.{DIGITS}g}")
        return int(x) if x == int(x) and abs(x) < 1e15 else x
    return x
