"""Make the rows of backends/triton/tuning.py: compile, check and time every candidate tile on this GPU."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

from flashtile.backends.gpu.config import Config
from flashtile.backends.triton import tuning
from flashtile.backends.triton.tuning import DECODES
from flashtile.lab.bench import records, workers
from flashtile.lab.bench.candidates import ITEMSIZE, Limits, Target, candidates
from flashtile.lab.bench.gpu.bench import Bench, Calls, difference
from flashtile.lab.bench.gpu.device import Device
from flashtile.lab.bench.gpu.peers import short_error
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.suite import Progress
from flashtile.lab.bench.tables.tune import short
from flashtile.lab.bench.timing import Call, Timing, geometric_mean, repeated

TOKENS, HIDDEN = 16384, 2048
LENGTHS = (1024, 4096)  # of a training sequence: a tile has to suit both
# Batch and keys of a decoding step, with 32 heads on 8.
CACHES = {"decode": ((1, 32768), (16, 8192)), "decode-short": ((1, 8192),)}
SPILLS = 512  # words per thread: rare paths may spill some; if a loop spills, it is not worth timing
SAME = {"bfloat16": 1e-2, "float32": 1e-5}  # ||this - default|| / ||default|| that rounding explains
LONGEST = 120.0  # seconds to compile and check one candidate
SAMPLE = 0.005
JIT_NAMES = {"dkdv": "dkdv_kernel", "dq": "dq_kernel"}  # others are tiles of forward_kernel


def calls(target: Target, device: str = "cuda") -> list[Call]:
    """The passes to time a candidate with, each returning the tensors that the kernel makes."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], bool]]
    if target.kernel in DECODES:
        shapes = [((b, 32, 1, target.dim), (b, 8, keys, target.dim), False) for b, keys in CACHES[target.kernel]]
    else:
        trained = [(TOKENS // n, HIDDEN // target.dim, n, target.dim) for n in LENGTHS]
        shapes = [(shape, shape, causal) for shape in trained for causal in (False, True)]
    return [_pass(target, *shape, device) for shape in shapes]


def _pass(target: Target, q_shape: Sequence[int], k_shape: Sequence[int], causal: bool, device: str) -> Call:
    import torch

    from flashtile import dispatch
    from flashtile.problem import describe

    rng = torch.Generator(device).manual_seed(0)

    def random_tensor(shape: Sequence[int]) -> Any:
        return torch.randn(shape, generator=rng, device=device, dtype=getattr(torch, target.dtype))

    problem = describe(random_tensor(q_shape), random_tensor(k_shape), random_tensor(k_shape), causal=causal)

    prepare = partial(dispatch.named("triton").prepare, problem)  # for each pass: the candidate may have changed

    def forward() -> tuple[Any, Any]:
        runner, inputs = prepare()
        return runner.forward(inputs)

    if target.kernel in ("forward", *DECODES):
        return forward
    dout = random_tensor(q_shape)
    out, lse = forward()

    def backward() -> Any:
        runner, inputs = prepare()
        return runner.backward(inputs, dout, out, lse, None)[:3]

    return backward


@contextmanager
def loading() -> Iterator[list[dict[str, Any]]]:
    """Record the kernels that Triton loads: name, registers, spills, shared memory."""
    from triton.compiler.compiler import CompiledKernel

    seen: list[dict[str, Any]] = []
    load = CompiledKernel._init_handles

    def recorded(self: Any) -> None:
        fresh = self.module is None
        load(self)
        if fresh:
            about = {"registers": self.n_regs, "spills": self.n_spills, "shared": self.metadata.shared}
            seen.append({"name": self.name, **about})

    CompiledKernel._init_handles = recorded
    try:
        yield seen
    finally:
        CompiledKernel._init_handles = load


@lru_cache(maxsize=1)  # jobs come target by target, and a target's tensors take a gigabyte
def _expected(target: Target) -> tuple[list[Call], list[Any]]:
    """The passes, and their results with the current table."""
    made = calls(target)
    return made, [call() for call in made]


def check(job: workers.Job) -> dict[str, Any]:
    """Compile a candidate in a worker, run it once, and compare. "rejected" is the reason against it."""
    import torch
    from triton.errors import TritonError

    target, config = Target(**job["target"]), Config(*job["config"])
    passes, expected = _expected(target)
    answer: dict[str, Any] = {"rejected": None}
    try:
        with loading() as loaded, tuning.override(target.kernel, config):
            results = [call() for call in passes]
            torch.cuda.synchronize()
    except TritonError as error:  # it cannot be compiled, or needs more than the device has
        return answer | {"rejected": short_error(error)}
    found = [kernel for kernel in loaded if kernel["name"] == JIT_NAMES.get(target.kernel, "forward_kernel")]
    if not found and not job["today"]:
        return answer | {"rejected": "no launch used it"}
    answer |= {key: max((k[key] for k in found), default=None) for key in ("registers", "spills", "shared")}
    answer["difference"] = max(difference(a, b) for a, b in zip(results, expected, strict=True))
    return answer | {"rejected": why_not(target, answer)}


def why_not(target: Target, found: dict[str, Any]) -> str | None:
    """Why a candidate that runs is refused: too many spills, or a different result."""
    if found["spills"] is not None and found["spills"] > SPILLS:
        return f"it spills {found['spills']} words"
    if not found["difference"] <= SAME[target.dtype]:
        return f"its result differs by {found['difference']:.2g}"
    return None


def times(
    target: Target, configs: Sequence[Config], device: Device, rounds: int, rng: random.Random
) -> dict[Config, float]:
    """Seconds per pass with each candidate, as the geometric mean over the shapes; candidates take turns."""
    bench = Bench(device, (), rounds, SAMPLE, rng)
    measured: dict[Config, list[Timing]] = {config: [] for config in configs}
    for call in calls(target, device.name):
        contenders: Calls = {
            str(n): partial(repeated, _with(target.kernel, config, call, device)) for n, config in enumerate(configs)
        }
        for config, timing in zip(configs, bench.device_times(contenders).values(), strict=True):
            measured[config].append(timing)
    return {config: geometric_mean(t.median for t in each) for config, each in measured.items()}


def _with(kernel: str, config: Config, call: Call, device: Device) -> Call:
    """The pass with this candidate as a graph, because a decoding step is faster than its launch on the host."""

    def run() -> Any:
        with tuning.override(kernel, config):
            return call()

    return device.captured(run)


def run(
    device: Device,
    limits: Limits,
    wanted: Sequence[Target],
    *,
    rounds: int = 7,
    count: int | None = None,
    seconds: float | None = None,
    progress: Progress = lambda what, done, total: None,
    save: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Check every candidate in `count` processes, then time those that passed; record why the others failed."""
    end = None if seconds is None else time.monotonic() + seconds
    about = device.describe()
    record = records.new("tune", False, rounds=rounds, device=about, fields=list(Config._fields)) | {"left_out": []}
    jobs = _jobs(wanted, limits, tuple(about["capability"]))

    def done(job: workers.Job, n: int) -> None:
        progress(f"checked {Target(**job['target']).name} {short(job['config'])}", n, len(jobs))

    answers = workers.run(f"{__name__}:check", jobs, workers=count, seconds=LONGEST, done=done, end=end)
    rng = random.Random(42)
    for n, target in enumerate(wanted):
        if end is not None and time.monotonic() >= end:
            record["left_out"] = [left.name for left in wanted[n:]]
            break
        progress(f"timing {target.name}", n, len(wanted))
        tried = [(Config(*j["config"]), a) for j, a in zip(jobs, answers, strict=True) if j["target"] == asdict(target)]
        record["measurements"].append(_measured(target, tried, device, rounds, rng))
        save(record)
    save(record)
    progress("done", len(wanted), len(wanted))
    return record


def _jobs(wanted: Sequence[Target], limits: Limits, capability: tuple[int, int]) -> list[workers.Job]:
    """The current entries come first: all others are compared with them, and find them compiled on disk."""
    today = {
        target: tuning.choose(target.kernel, target.dim, target.dim, ITEMSIZE[target.dtype], capability, False)
        for target in wanted
    }
    tried = [*today.items(), *((t, c) for t in wanted for c in candidates(t, limits) if c != today[t])]
    return [{"target": asdict(t), "config": list(c), "today": c == today[t]} for t, c in tried]


def _measured(
    target: Target, tried: Sequence[tuple[Config, workers.Job]], device: Device, rounds: int, rng: random.Random
) -> dict[str, Any]:
    """One target: each candidate with its time or the reason against it, the best, and today's, which comes first."""
    today = tried[0][0]
    reasons = {config: answer.get(workers.FAILED) or answer.get("rejected") for config, answer in tried}
    passed = [config for config, reason in reasons.items() if reason is None]
    found = times(target, list(dict.fromkeys([today, *passed])), device, rounds, rng)
    rows = [
        {"config": list(config), "seconds": found.get(config), "why_not": reasons[config]}
        | {key: answer.get(key) for key in ("registers", "spills", "shared", "difference")}
        for config, answer in tried
    ]
    best = min(found, key=lambda config: found[config])
    return {
        **asdict(target),
        "today": list(today),
        "today_seconds": found[today],
        "best": list(best),
        "best_seconds": found[best],
        "candidates": rows,
    }
