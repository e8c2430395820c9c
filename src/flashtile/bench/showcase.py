"""Equivalence, memory and speed on this machine in under a minute: what `flashtile demo` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashtile import dispatch, machine
from flashtile.backends import reference, tiles
from flashtile.bench import memory, peers
from flashtile.bench.cases import FORWARD, Case, square
from flashtile.bench.peers import NAIVE_NUMPY, Workload
from flashtile.bench.suite import Progress, time_all
from flashtile.dtypes import narrow, widen
from flashtile.problem import Problem, describe

# (name, shape of q, key heads, dtype, options): every kind of mask, ragged sizes, grouped heads, every dtype.
CONFIGURATIONS: tuple[tuple[str, tuple[int, ...], int, str, dict[str, Any]], ...] = (
    ("full", (1, 2, 256, 64), 2, "float64", {}),
    ("full, ragged", (1, 2, 237, 40), 2, "float64", {}),
    ("causal", (1, 2, 512, 64), 2, "float64", {"causal": True}),
    ("causal, ragged", (2, 2, 301, 33), 2, "float64", {"causal": True}),
    ("window", (1, 2, 512, 64), 2, "float32", {"window": (100, 20)}),
    ("grouped heads", (1, 8, 256, 64), 2, "float32", {"causal": True}),
    ("softcap and ALiBi", (1, 4, 256, 64), 4, "float32", {"softcap": 20.0, "alibi": np.full(4, 0.1, np.float32)}),
    ("dropout", (1, 2, 256, 64), 2, "float32", {"dropout": 0.2, "seed": 7}),
    ("long", (1, 2, 1024, 64), 2, "float32", {"causal": True}),
    ("bfloat16", (1, 2, 512, 64), 2, "bfloat16", {}),
    ("float16", (1, 2, 512, 64), 2, "float16", {"causal": True}),
)
BLOCKS = ((16, 16), (64, 32), (100, 7))
LENGTHS = (1024, 2048, 4096)
SPEED = tuple(square(n, 64, naive=True) for n in (256, 512, 1024, 2048))
SECONDS = 1.5  # of timing, a case

Forward = Callable[[Problem], tuple[Any, Any]]


def run(progress: Progress = lambda what, done, total: None, *, threads: int | None = None) -> dict[str, Any]:
    """The three parts as plain values; "holds" says whether every result was as exact as it must be."""
    threads = threads or peers.default_threads()
    peers.set_threads(threads)
    cases = SPEED[:-1] if dispatch.TABLE[0].missing() else SPEED  # without the C++ core, no long ones
    total = len(CONFIGURATIONS) + len(LENGTHS) + len(cases)
    equivalence, grown, speed = [], [], []
    for done, configuration in enumerate(CONFIGURATIONS):
        progress(f"equivalence: {configuration[0]}", done, total)
        equivalence.append(_equivalence(*configuration))
    for done, n in enumerate(LENGTHS, len(CONFIGURATIONS)):
        progress(f"memory: N = {n}", done, total)
        grown.append(_memory(n, threads))
    for done, case in enumerate(cases, total - len(cases)):
        progress(f"speed: {case.name}", done, total)
        speed.append(_speed(case, threads))
    progress("done", total, total)
    return {
        "machine": machine.describe(),
        "threads": threads,
        "absent": peers.absent(),
        "equivalence": equivalence,
        "memory": grown,
        "speed": speed,
        "holds": all(row["holds"] for row in equivalence),
    }


def forwards(problem: Problem) -> dict[str, Forward]:
    """Every tiled way to compute it here: the backends that can, and NumPy tiles of several sizes in both orders."""
    ways: dict[str, Forward] = {
        row.name: row.forward
        for row in dispatch.TABLE
        if row.name not in ("tiles", "reference") and row.why_not(problem, "cpu") is None
    }
    for order in ("fa1", "fa2"):
        for br, bc in BLOCKS:
            ways[f"tiles {order} {br}x{bc}"] = _tiled(order, br, bc)
    return ways


def _tiled(order: str, br: int, bc: int) -> Forward:
    return lambda problem: tiles.forward(problem, order, br, bc)


def _equivalence(
    name: str, shape: tuple[int, ...], kv_heads: int, dtype: str, options: dict[str, Any]
) -> dict[str, Any]:
    """The largest error of each way against the oracle, beside that of standard attention in the same dtype."""
    rng = np.random.default_rng(42)
    batch, _, n, dim = shape
    keys = (batch, kv_heads, n, dim)
    q, k, v = (narrow(rng.standard_normal(s), dtype) for s in (shape, keys, keys))
    problem = describe(q, k, v, **options)
    oracle, _ = reference.forward(problem)

    def error(out: Any) -> float:
        return float(np.abs(widen(narrow(out, dtype), np.float64) - oracle).max())

    standard = error(reference.forward(problem, dtype)[0])
    errors = {way: error(forward(problem)[0]) for way, forward in forwards(problem).items()}
    # The oracle is float64 itself: there, standard attention's error is 0 and only rounding is left to allow for.
    limit = 1e-12 if dtype == "float64" else 2 * standard
    return {
        "case": name,
        "shape": list(shape),
        "dtype": dtype,
        "standard_error": standard,
        "errors": errors,
        "limit": limit,
        "holds": max(errors.values()) <= limit,
    }


def _memory(n: int, threads: int) -> dict[str, Any]:
    """How far a fresh process grows: ours, and standard attention in NumPy."""
    case = Case(n, n, 64, heads=1, kv_heads=1)
    contenders = {peers.OURS: memory.OURS_NUMPY, NAIVE_NUMPY: NAIVE_NUMPY}
    return {
        "n": n,
        "score_matrix": 4 * n * n,
        "output": 4 * n * 64,
        "grown": {name: memory.growth(contender, case, FORWARD, threads) for name, contender in contenders.items()},
    }


def _speed(case: Case, threads: int) -> dict[str, Any]:
    times = time_all(peers.contenders(Workload(case, threads)), SECONDS, min_rounds=1)
    return {**case.to_dict(), "times": {name: timing.to_dict() for name, timing in times.items()}}
