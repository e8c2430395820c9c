"""The speed test of `flashtile demo`: a few seconds on the CPU and a GPU, compared with torch and NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtile import dispatch
from flashtile.cost.hardware import Rates
from flashtile.cost.plan import Plan
from flashtile.lab.bench import workload
from flashtile.lab.bench.cases import FORWARD, TRAINING, Case, square
from flashtile.lab.bench.gpu import ceilings
from flashtile.lab.bench.gpu.device import Cuda, Device
from flashtile.lab.bench.suite import time_all
from flashtile.lab.bench.timing import Call, Timing, alternate
from flashtile.lab.bench.workload import NAIVE_NUMPY, NAIVE_TORCH, Workload

CPU = (
    *(square(n, 64, naive=True) for n in (256, 512, 1024, 2048)),
    *(square(n, 64, naive=True, direction=TRAINING) for n in (512, 1024)),
)
GPU = tuple(
    square(n, 128, heads=16, kv_heads=16, batch=16384 // n, dtype="bfloat16", naive=True, direction=direction)
    for direction in (FORWARD, TRAINING)
    for n in (1024, 4096)
)
STANDARD = (NAIVE_TORCH, NAIVE_NUMPY)  # these store the scores
SECONDS, QUICK_SECONDS = 1.0, 0.05  # of timing per case


@dataclass(frozen=True, slots=True)
class Run:
    """One contender on one case."""

    seconds: float  # median
    q1: float
    q3: float
    rounds: int
    flops_per_second: float
    utilisation: float  # of the best rate measured on this device
    intensity: float  # FLOPs per byte moved in the forward pass, as plan() counts them without a cache
    grown: int | None = None  # bytes of device memory beyond inputs and results, if the device reports them


@dataclass(frozen=True, slots=True)
class Row:
    """One case, with all contenders that can run it."""

    case: str
    heads: int
    n: int
    dim: int
    dtype: str
    direction: str
    backend: str | None
    flops: int
    runs: dict[str, Run]


@dataclass(frozen=True, slots=True)
class Side:
    """One device: its best measured rates, and the results of each contender."""

    device: str
    rates: Rates
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Speed:
    threads: int
    absent: dict[str, str]  # peers that were not timed, and why
    cpu: Side
    gpu: Side | None
    no_gpu: str | None  # why there is none

    @property
    def sides(self) -> tuple[Side, ...]:
        return (self.cpu,) if self.gpu is None else (self.cpu, self.gpu)


def run(best: Rates, quick: bool = False, threads: int | None = None) -> Speed:
    """Time every case on the CPU, whose best rates are given, and on the GPU if there is one."""
    threads = threads or workload.default_threads()
    workload.set_threads(threads)
    native, triton = (next(row for row in dispatch.TABLE if row.name == name) for name in ("native", "triton"))
    longest = 512 if quick else 1024 if native.missing() else 2048  # without the C++ core, longer ones are slow
    timed = []
    for case in CPU:
        if case.n_q <= longest:
            calls = workload.contenders(Workload(case, threads))
            timed.append(Timed(case, time_all(calls, QUICK_SECONDS if quick else SECONDS, min_rounds=1)))
    cpu, no_gpu = _side("CPU", "cpu", best, timed), triton.missing()
    return Speed(threads, workload.absent(), cpu, None if no_gpu else on_gpu(Cuda(), GPU, quick), no_gpu)


def on_gpu(device: Device, cases: Sequence[Case], quick: bool = False) -> Side:
    """Time bfloat16 against torch's attention and three torch calls, with the memory that each call takes."""
    seconds = QUICK_SECONDS if quick else SECONDS
    product, copy = ceilings.product(device.name), ceilings.copy(device.name)
    times = alternate({"product": product.call, "copy": copy.call}, seconds=seconds, clock=device.seconds)
    best = Rates(product.amount / min(times["product"].samples), copy.amount / min(times["copy"].samples))
    timed = []
    for case in cases:
        work = Workload(case, workload.default_threads(), device.name)
        calls: dict[str, Call] = {name: workload.step(work, make(work)) for name, make in workload.IN_TORCH.items()}
        grown = {name: n for name, call in calls.items() if (n := _growth(device, call)) is not None}
        calls = {name: call for name, call in calls.items() if name in grown}
        timed.append(Timed(case, alternate(calls, seconds=seconds, clock=device.seconds), grown))
    return _side(str(device.describe()["name"]), device.name, best, timed)


def _growth(device: Device, call: Call) -> int | None:
    """The bytes of memory that a call takes; None if the device runs out of memory."""
    import torch

    try:
        return device.growth(call)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


class Timed(NamedTuple):
    """The measurements of one case."""

    case: Case
    times: dict[str, Timing]
    grown: dict[str, int] = {}  # noqa: RUF012


def _side(name: str, device: str, best: Rates, timed: Sequence[Timed]) -> Side:
    """One device's rows. If a contender was faster than the product, its rate is the best: none is above the roof."""
    seen = [_flops(t.case, t.case.plan(device)) / min(timing.samples) for t in timed for timing in t.times.values()]
    best = Rates(max(best.flops, *seen), best.bytes)
    return Side(name, best, tuple(_row(t, t.case.plan(device), best) for t in timed))


def _row(timed: Timed, planned: Plan, best: Rates) -> Row:
    case, flops = timed.case, _flops(timed.case, planned)
    runs = {
        name: Run(
            timing.median,
            *timing.quartiles,
            len(timing.samples),
            flops / timing.median,
            flops / timing.median / best.flops,
            planned.flops / (planned.standard_bytes if name in STANDARD else planned.tile_bytes),
            timed.grown.get(name),
        )
        for name, timing in timed.times.items()
    }
    return Row(case.name, case.heads, case.n_q, case.dim, case.dtype, case.direction, planned.backend, flops, runs)


def _flops(case: Case, planned: Plan) -> int:
    return planned.flops + (planned.backward_flops if case.direction == TRAINING else 0)
