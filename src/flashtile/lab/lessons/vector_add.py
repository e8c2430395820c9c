"""Vector addition on a GPU: a block per program, a mask for the last block, and the cost of a launch.

A CPU iterates over the vector. A GPU starts many programs, and each computes its elements from its program id.
program() is such a program in NumPy, where they run one after another; kernels/vector_add.py is the same in Triton,
where they run in parallel. Larger kernels, attention included, have the same parts: program id, positions, mask.
"""

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from flashtile.lab.bench.timing import alternate
from flashtile.lab.lessons import device
from flashtile.lab.lessons.lesson import Unavailable
from flashtile.lab.lessons.text import Say
from flashtile.lab.units import quantity, seconds
from flashtile.numerics.dtypes import Array

BLOCK = 1024
SIZES = (10_000, 1_000_000, 10_000_000)
Call = Callable[[], Any]
Way = tuple[Call, Callable[[], Array]]  # the call, and a function that returns its result


def loop(a: "array[float]", b: "array[float]", c: "array[float]") -> None:
    """One worker processes one element after another."""
    for i in range(len(a)):
        c[i] = a[i] + b[i]


def program(number: int, a: Array, b: Array, c: Array, block: int) -> tuple[Array, Array]:
    """One of many workers; return its positions, and which of them are inside the vector."""
    o = number * block + np.arange(block)
    inside = o < len(a)
    mine = o[inside]
    c[mine] = a[mine] + b[mine]
    return o, inside


def programs(a: Array, b: Array, c: Array, block: int = BLOCK) -> None:
    """Run all workers. On a GPU they run in parallel, here one by one."""
    for number in range(-(-len(a) // block)):
        program(number, a, b, c, block)


def on_triton(where: str, a: Array, b: Array) -> Way:
    """Prepare the kernel on a device, with the vectors already there."""
    import torch

    from flashtile.lab.lessons.kernels.vector_add import add_kernel

    n, grid = len(a), (-(-len(a) // BLOCK),)
    x, y = torch.from_numpy(a).to(where), torch.from_numpy(b).to(where)
    c = torch.full_like(x, float("nan"))
    return device.finished(lambda: add_kernel[grid](x, y, c, n, BLOCK=BLOCK), where), lambda: c.cpu().numpy()


def run(say: Say, quick: bool = False) -> dict[str, Any]:
    say.heading("Ten elements, blocks of four")
    a, b = np.arange(10.0), 100 * np.arange(10.0)
    c = np.full(10, np.nan)
    rows = []
    for number in range(3):
        o, inside = program(number, a, b, c, 4)
        written = " ".join(f"{x:g}" for x in c[o[inside]])
        rows.append((str(number), " ".join(map(str, o)), " ".join("ny"[int(x)] for x in inside), written))
    say.table(("program", "positions", "inside?", "writes"), rows)
    say.paragraph("The last program reaches past the end. Its mask prevents reads and writes there.")

    try:
        where = device.for_triton()
        say.paragraph(
            "Triton runs on the GPU here."
            if where == "cuda"
            else "No GPU is used here: Triton interprets its kernel in NumPy, which says nothing about its speed.",
        )
    except Unavailable as reason:
        where = ""
        say.paragraph(f"The Triton kernel is left out: {reason}.")
    sizes = SIZES[:2] if quick else SIZES
    measured = [measure(n, where, 0.05 if quick else 1) for n in sizes]

    say.heading("Time")
    ways = list(measured[0]["times"])
    say.table(
        ("way", *(f"n = {row['n']:,}" for row in measured)),
        [
            (way, *(seconds(row["times"][way]["median_s"]) if way in row["times"] else "-" for row in measured))
            for way in ways
        ],
    )
    wrong = {way: error for row in measured for way, error in row["errors"].items() if error}
    say.paragraph(f"Wrong: {wrong}." if wrong else "All ways give the same numbers, bit for bit.")

    sweep = overhead(where, tuple(10**power for power in range(5 if quick else 9 if where == "cuda" else 8)))
    for worker in sweep:
        say.paragraph(_described(worker))
    return {"device": where, "block": BLOCK, "measured": measured, "sweep": sweep, "holds": not wrong}


def measure(n: int, where: str, duration: float) -> dict[str, Any]:
    """Time every way to add two vectors of n elements, and check its result."""
    rng = np.random.default_rng(42)
    a, b = rng.standard_normal(n, np.float32), rng.standard_normal(n, np.float32)
    c, d = np.full_like(a, np.nan), np.full_like(a, np.nan)
    slow = [array("f", x.tobytes()) for x in (a, b, c)]
    ways: dict[str, Way] = {
        "a loop in Python": (lambda: loop(*slow), lambda: np.array(slow[2], np.float32)),
        "programs in NumPy, one by one": (lambda: programs(a, b, c), lambda: c),
        "NumPy, one call": (lambda: np.add(a, b, out=d), lambda: d),
    }
    if where == "cuda":
        ways["Triton, on the GPU"] = on_triton(where, a, b)
    elif where == "cpu" and n <= SIZES[0]:
        ways["Triton, interpreted"] = on_triton(where, a, b)
    times = alternate({name: way[0] for name, way in ways.items()}, seconds=duration, min_rounds=1, max_rounds=100)
    return {
        "n": n,
        "times": {name: timing.to_dict() for name, timing in times.items()},
        "errors": {name: float(np.abs(way[1]() - (a + b)).max()) for name, way in ways.items()},
    }


def overhead(where: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measure the overhead of a call, and the length from which the work costs more than that."""
    times: dict[str, dict[int, float]] = {}
    for n in sizes:
        a, b, c = (np.ones(n, np.float32) for _ in range(3))
        calls: dict[str, Call] = {"NumPy": partial(np.add, a, b, out=c)}
        if where == "cuda":
            calls["GPU"] = on_triton(where, a, b)[0]
        for name, timing in alternate(calls, seconds=0.03, max_rounds=200).items():
            times.setdefault(name, {})[n] = timing.median
    return [
        {
            "worker": worker,
            "seconds": {str(n): t for n, t in taken.items()},
            "overhead_s": taken[sizes[0]],
            "work_outweighs_from": next((n for n in sizes if taken[n] > 2 * taken[sizes[0]]), None),
            "faster_than_numpy_from": next((n for n in sizes if taken[n] < times["NumPy"][n]), None),
        }
        for worker, taken in times.items()
    ]


def _described(worker: dict[str, Any]) -> str:
    longest, last = list(worker["seconds"].items())[-1]
    text = f"{worker['worker']}: a call for one element takes {seconds(worker['overhead_s'])}, all of it overhead. "
    if worker["work_outweighs_from"] is None:
        text += f"Up to n = {int(longest):,} the work never outweighs that."
    else:
        text += f"From about n = {worker['work_outweighs_from']:,} on, the work outweighs that."
    text += f" At n = {int(longest):,} it moves {quantity(12 * int(longest) / last, 'B/s')}."
    if worker["worker"] == "GPU":
        first = worker["faster_than_numpy_from"]
        text += f" It is faster than NumPy from n = {first:,} on." if first else " NumPy was faster at every length."
    return text
