"""Launches: six trips through memory or two, and why a Python loop of array calls is not flash attention.

On a GPU every operation is a separate kernel: it is launched, reads its inputs from the large memory (HBM) and writes
its result there. What counts is how often the numbers travel. Nothing here is estimated: Traffic records each block
that a kernel moves, Calls every single NumPy or torch call, while they run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import flashtile
from flashtile import dispatch
from flashtile.backends import tiles
from flashtile.host import machine
from flashtile.lab.bench.suite import time_all
from flashtile.lab.bench.timing import Call, alternate
from flashtile.lab.bench.workload import OURS
from flashtile.lab.lessons import device
from flashtile.lab.lessons.text import Say
from flashtile.lab.lessons.tiled_attention import standard, tiled
from flashtile.lab.units import size
from flashtile.numerics.dtypes import Array
from flashtile.numerics.schedule import Event, Launch, Load, Store
from flashtile.problem import describe

BLOCK, DIM = 128, 64
SCALE = DIM**-0.5


@dataclass
class Traffic:
    """The bytes that each kernel reads from HBM and writes to it, by the events of a run of the tiles backend."""

    launches: list[dict[str, Any]] = field(default_factory=list)

    def launch(self, kernel: str) -> None:
        self.launches.append({"kernel": kernel, "read": 0, "written": 0})

    def observe(self, event: Event, at: tiles.Machine) -> None:
        match event:
            case Launch(name):
                self.launch(name)
            case Load(name, n) | Store(name, n):
                block = at.hbm[name][at.grid.block(name, n)]
                self.launches[-1]["read" if isinstance(event, Load) else "written"] += block.nbytes

    @property
    def trips(self) -> int:
        """One for each kernel that read, and one for each that wrote."""
        return sum((launch["read"] > 0) + (launch["written"] > 0) for launch in self.launches)

    @property
    def moved(self) -> int:
        return sum(launch["read"] + launch["written"] for launch in self.launches)


@dataclass
class Calls:
    """Calls of a library: each reads its arguments from memory and writes its result there."""

    calls: int = 0
    bytes: int = 0

    def add(self, *arrays: Any) -> None:
        self.calls += 1
        self.bytes += sum(x.nbytes for x in arrays if hasattr(x, "nbytes"))


def counting(calls: Calls, *arrays: Array) -> list[Array]:
    """Return views that count every operation on them and on their results."""

    class Counting(np.ndarray):
        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
            if "out" in options:
                options["out"] = tuple(x.view(np.ndarray) for x in options["out"])
            inputs = tuple(x.view(np.ndarray) if isinstance(x, Counting) else x for x in inputs)
            result = np.asarray(getattr(ufunc, method)(*inputs, **options))
            calls.add(*inputs, result)
            return result.view(Counting)

    return [x.view(Counting) for x in arrays]


@contextmanager
def counting_torch(calls: Calls) -> Iterator[None]:
    """Count torch operations, each of which becomes a launch. Views move nothing."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not func.is_view:
                calls.add(*args, *(result if isinstance(result, tuple) else (result,)))
            return result

    with Mode():  # type: ignore[no-untyped-call]
        yield


def run(say: Say, quick: bool = False) -> dict[str, Any]:
    n = 512 if quick else 2048
    rng = np.random.default_rng(42)
    Q, K, V = (rng.standard_normal((n, DIM)).astype(np.float32) for _ in range(3))

    say.heading("Three launches and one")
    problem, three, one = describe(Q, K, V), Traffic(), Traffic()
    standard_out, _ = tiles.standard(problem, BLOCK, three.observe)
    one.launch("attention")  # everything below is inside one kernel
    flash_out, _ = tiles.forward(problem, "fa2", BLOCK, BLOCK, one.observe)
    say.table(
        ("method", "kernel", "read", "written"),
        [
            (name, launch["kernel"], size(launch["read"]), size(launch["written"]))
            for name, traffic in (("standard", three), ("flash", one))
            for launch in traffic.launches
        ],
    )
    difference = float(np.abs(standard_out - flash_out).max())
    say.paragraph(
        f"N = {n}, D = {DIM}, float32, tiles of {BLOCK} x {BLOCK}. Standard: {len(three.launches)} launches, "
        f"{three.trips} trips through memory, {size(three.moved)}. Flash: {len(one.launches)} launch, "
        f"{one.trips} trips, {size(one.moved)}, {three.moved / one.moved:.1f} times less. "
        f"The outputs differ by {difference:.1e}. "
        "Flash mostly rereads K and V for each row of tiles; a cache holds much of that.",
    )

    say.heading("A Python loop is not flash attention")
    calls, times = on_cpu(say, Q, K, V, 0.2 if quick else 1)
    loop, naive = calls["tiled loop"], calls["standard"]
    say.paragraph(
        f"The loop follows the steps of flash attention, but it makes {loop['calls']} calls instead of "
        f"{naive['calls']} and moves {loop['bytes'] / naive['bytes']:.1f} times the bytes of standard attention: every "
        "S, P and factor is written by one call and read by the next. On a GPU each call is a launch, and these bytes "
        "go through HBM. The tile has to stay on the chip, so the loop must be inside one kernel.",
    )
    on_gpu = on_torch(say, "cuda", quick) if machine.gpu() else None
    say.paragraph(
        "That kernel can still be written in Python. Triton and Gluon compile a Python function to one GPU kernel: the",
        "lesson fused-attention is this loop in Triton, and this package's GPU kernels are written that way.",
    )
    return {
        "n": n,
        "standard": {"launches": three.launches, "trips": three.trips, "bytes": three.moved},
        "flash": {"launches": one.launches, "trips": one.trips, "bytes": one.moved},
        "error": difference,
        "calls": calls,
        "times": times,
        "gpu": on_gpu,
        "holds": difference < 1e-5,
    }


def on_cpu(say: Say, Q: Array, K: Array, V: Array, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Standard attention, the tiled loop, and one call of the C++ core: calls, bytes and time."""
    ways: dict[str, Callable[..., Any]] = {"standard": standard, "tiled loop": lambda q, k, v: tiled(q, k, v, BLOCK)}
    counts = {name: Calls() for name in ways}
    for name, way in ways.items():
        way(*counting(counts[name], Q, K, V))
    native = dispatch.TABLE[0]
    if reason := native.missing():
        say.paragraph(f"The C++ core is not compared: {reason}.")
    else:
        ways[OURS] = partial(flashtile.attention, backend=native.name)
        counts[OURS] = Calls()
        counts[OURS].add(Q, K, V, ways[OURS](Q, K, V))
    calls = _show(say, counts)
    contenders: dict[str, Call] = {name: partial(way, Q, K, V) for name, way in ways.items()}
    return calls, say.timings(f"N = {len(Q)}, CPU", time_all(contenders, seconds))


def on_torch(say: Say, where: str, quick: bool = False) -> dict[str, Any]:
    """The same with torch on a device, where every call is at least one launch."""
    import torch

    n = 512 if quick else 4096
    torch.manual_seed(42)
    Q, K, V = (torch.randn(n, DIM, device=where) for _ in range(3))
    ways: dict[str, Callable[[], Any]] = {
        "standard": lambda: torch.softmax(Q @ K.T * SCALE, dim=1) @ V,
        "tiled loop": lambda: tiled(Q, K, V, BLOCK, xp=torch),
        OURS: lambda: flashtile.attention(Q, K, V),
    }
    counts = {name: Calls() for name in ways}
    for name, way in ways.items():
        with counting_torch(counts[name]):
            way()
    calls = _show(say, counts)
    contenders = {name: device.finished(way, where) for name, way in ways.items()}
    times = say.timings(f"N = {n}, torch on {where}", alternate(contenders, seconds=0.1 if quick else 1))
    return {"n": n, "device": where, "calls": calls, "times": times}


def _show(say: Say, counts: dict[str, Calls]) -> dict[str, dict[str, int]]:
    rows = [(name, str(count.calls), size(count.bytes)) for name, count in counts.items()]
    say.table(("way", "calls", "bytes in and out of calls"), rows)
    return {name: {"calls": count.calls, "bytes": count.bytes} for name, count in counts.items()}
