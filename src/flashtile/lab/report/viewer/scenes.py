"""scenes(): every trace, counter and sentence that the viewer replays, as plain values for JSON."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from flashtile.api import attention_backward, standard_attention
from flashtile.band import FAR
from flashtile.cost import traffic
from flashtile.cost.trace import Trace, trace
from flashtile.lab.report.viewer import clock, fit, run, sentences, warps
from flashtile.lab.report.viewer.run import Run
from flashtile.lab.report.viewer.scene import QUICK, SCENES, Scene
from flashtile.numerics.dtypes import Array

SIDE_BY_SIDE = ("standard", "fa1", "fa2")
ORDERS = (*SIDE_BY_SIDE, "backward")


def scenes(quick: bool = False) -> dict[str, Any]:
    """Record all scenes, or a few of them with `quick`; always the same."""
    chosen = [scene for scene in SCENES if not quick or scene.name in QUICK]
    return {
        "counters": list(run.COUNTERS),
        "sentences": sentences.LENS,
        "scenes": [_record(scene) for scene in chosen],
        "fit": fit.fit(),
        "warps": warps.splits(),
    }


def _record(scene: Scene) -> dict[str, Any]:
    inputs = scene.inputs()
    exact = _exact(scene, inputs)
    runs = {order: run.record(scene, _trace(scene, inputs, order), exact) for order in ORDERS}
    moved = {order: [counts[0] for counts in runs[order].counts] for order in ORDERS}
    grid = asdict(scene.grid)
    return {
        "name": scene.name,
        "title": scene.title,
        "about": scene.description,
        **grid,
        "dim": scene.layout.dim,
        "dtype": scene.layout.dtype,
        "band": {name: x if abs(x) < FAR else None for name, x in asdict(scene.band).items()},
        "spans": None if scene.spans is None else scene.spans.limits[0, 0].tolist(),
        "tiles": {kind.name.lower(): n for kind, n in traffic.tile_counts(scene.visible, *grid.values()).items()},
        "cuts": [[asdict(c) for c in row] for row in traffic.rows_of(scene.visible, *grid.values())],
        "row": _first_row(runs["fa2"]),
        "inputs": run.plain(inputs),
        "exact": run.plain(exact),
        **{
            name: {"forward": scale([runs[order] for order in SIDE_BY_SIDE]), "backward": scale([runs["backward"]])}
            for name, scale in _SCALES.items()
        },
        "start": {name: run.plain(_start(exact[x])) for name, x in (("forward", "out"), ("backward", "dq"))},
        "runs": {order: asdict(x) for order, x in runs.items()},
        "frames": {
            **{order: clock.frames({o: moved[o] for o in SIDE_BY_SIDE}, order) for order in SIDE_BY_SIDE},
            "backward": clock.frames({"backward": moved["backward"]}, "backward"),
        },
    }


def _trace(scene: Scene, x: dict[str, Array], order: str) -> Trace:
    dout = x["dO"] if order == "backward" else None
    q, k, v = x["Q"], x["K"], x["V"]
    return trace(q, k, v, order=order, block_q=scene.grid.br, block_k=scene.grid.bc, dout=dout, **scene.options)


def _exact(scene: Scene, x: dict[str, Array]) -> dict[str, Array]:
    """The results in float64, against which errors are measured."""
    q, k, v, dout = (x[name].astype(np.float64) for name in ("Q", "K", "V", "dO"))
    out, lse = standard_attention(q, k, v, **scene.options, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse, **scene.options, backend="reference")
    return {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def _first_row(fa2: Run) -> int:
    """The row to show first: the one whose maximum rises most often."""
    rises: dict[int, int] = {}
    for at, numbers in fa2.numbers.items():
        first = fa2.events[int(at)][1] * fa2.grid["br"]
        for r, case in enumerate(numbers["case"]):
            rises[first + r] = rises.get(first + r, 0) + (case == "bigger")
    return max(rises, key=lambda row: rises[row])


def _most(runs: list[Run]) -> dict[str, int]:
    """The largest counters of some runs, so that bars side by side share a scale."""
    return {name: max(x.counts[-1][run.COUNTERS.index(name)] for x in runs) for name in ("moved", "peak")}


def _start(exact: Array) -> Array:
    """The error of each row before it has seen a key."""
    return run.largest_error(np.zeros_like(exact), exact)


def _largest(runs: list[Run], of: Callable[[run.Numbers], list[float]]) -> list[float]:
    """The largest number of each row over all events with results."""
    found = [0.0] * runs[0].grid["n_q"]
    for each in runs:
        for at, numbers in each.numbers.items():
            if "out" in numbers:
                event = each.events[int(at)]
                first = event[1 if event[0] == "Tile" else 2] * each.grid["br"]
                for r, x in enumerate(of(numbers), first):
                    found[r] = max(found[r], x)
    return found


_SCALES: dict[str, Callable[[list[Run]], Any]] = {
    "most": _most,
    "reach": lambda runs: _largest(runs, lambda x: [max(map(abs, row)) for row in x["out"]]),  # of the bars of a row
    "worst": lambda runs: _largest(runs, lambda x: x["error"]),  # of each row after it has seen a key
}
