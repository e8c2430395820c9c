"""tune.py and tables/tune.py: candidates are checked and timed, and the rows can be pasted into tuning.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gpu import device as gpu  # noqa: E402
from flashtile.backends.gpu.config import Config  # noqa: E402
from flashtile.backends.triton import tuning  # noqa: E402
from flashtile.lab.bench import candidates, records, table, tune, workers  # noqa: E402
from flashtile.lab.bench.candidates import Limits, Target  # noqa: E402
from flashtile.lab.bench.tables import tune as tables  # noqa: E402
from tests.lab.bench.gpu.fakes import FakeDevice  # noqa: E402
from tests.tools.tree import ROOT  # noqa: E402

CACHES = {"decode": ((1, 64),), "decode-short": ((1, 512),)}
HOPPER = Limits(227 << 10, True)
FORWARD = Target("forward", "bfloat16", 128)


def config_of(target: Target) -> Config:
    return tuning.choose(target.kernel, target.dim, target.dim, candidates.ITEMSIZE[target.dtype], (9, 0), False)


def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TOKENS": 32, "LENGTHS": (16, 32), "HIDDEN": 16, "CACHES": CACHES}.items():
        monkeypatch.setattr(tune, name, value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of Triton's interpreter
@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_every_pass_runs_its_kernel_with_the_candidate(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    tiny(monkeypatch)
    target = Target(kernel, "float32", 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(gpu, "processors", lambda _device: 32)  # so that the longer cache is split
    asked: list[str] = []
    plain = tuning.choose
    monkeypatch.setattr(tuning, "choose", lambda name, *rest: asked.append(name) or plain(name, *rest))
    calls = tune.calls(target, device)
    assert len(calls) == (1 if kernel in tuning.DECODES else 4)  # causal and not, at each length
    for call in calls:
        asked.clear()
        with tuning.override(kernel, Config(16, 16, 4, 1)):
            narrow = call()
        assert kernel in asked
        assert tune.difference(narrow, call()) < 1e-5
        assert len(narrow) == (2 if kernel in ("forward", *tuning.DECODES) else 3)


def answering(monkeypatch: pytest.MonkeyPatch, result: Callable[[Config], float], spills: int = 0) -> None:
    """Fake passes whose result depends on the tile in the table, and a compiler that spills."""

    def call() -> Any:
        return (torch.tensor([result(config_of(FORWARD))]),)

    @contextmanager
    def loading() -> Iterator[list[dict[str, Any]]]:
        yield [{"name": "forward_kernel", "registers": 99, "spills": spills, "shared": 5}]

    monkeypatch.setattr(tune, "calls", lambda target: [call])
    monkeypatch.setattr(tune, "loading", loading)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tune._expected.cache_clear()


def job(*config: Any, today: bool = False) -> dict[str, Any]:
    return {"target": {"kernel": "forward", "dtype": "bfloat16", "dim": 128}, "config": list(config), "today": today}


def test_a_candidate_with_the_same_result_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, lambda config: 1.0)
    answer = tune.check(job(16, 16, 4, 2, False))
    assert answer == {"rejected": None, "registers": 99, "spills": 0, "shared": 5, "difference": 0}


@pytest.mark.parametrize(
    ("result", "spills", "reason"),
    [
        (lambda config: 1.0 + (config.block_q == 16) * 0.02, 0, "its result differs by 0.02"),
        (lambda config: float("nan") if config.block_q == 16 else 1.0, 0, "its result differs by inf"),
        (lambda config: 1.0, 1000, "it spills 1000 words"),
    ],
)
def test_a_candidate_that_is_refused(monkeypatch: pytest.MonkeyPatch, result: Any, spills: int, reason: str) -> None:
    answering(monkeypatch, result, spills)
    assert tune.check(job(16, 16, 4, 2, False))["rejected"] == reason


def test_a_candidate_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def result(config: Config) -> float:
        if config.block_q == 16:
            raise OutOfResources(300, 200, "shared memory")
        return 1.0

    answering(monkeypatch, result)
    assert "shared memory" in tune.check(job(16, 16, 4, 2, False))["rejected"]


def test_a_launch_that_ignores_the_candidate_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, lambda config: 1.0)

    @contextmanager
    def nothing() -> Iterator[list[Any]]:
        yield []

    monkeypatch.setattr(tune, "loading", nothing)
    assert tune.check(job(16, 16, 4, 2, False))["rejected"] == "no launch used it"
    assert tune.check(job(*config_of(FORWARD), today=True))["rejected"] is None


def test_loading_records_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from triton.compiler import compiler

    class Kernel:
        name, module, metadata = "a_kernel", None, SimpleNamespace(shared=7)

        def _init_handles(self) -> None:
            self.module, self.n_regs, self.n_spills = self.module or object(), 1, 2

    monkeypatch.setattr(compiler, "CompiledKernel", Kernel)
    with tune.loading() as seen:
        kernel = Kernel()
        kernel._init_handles()
        kernel._init_handles()
    Kernel()._init_handles()
    assert seen == [{"name": "a_kernel", "registers": 1, "spills": 2, "shared": 7}]


class TiledDevice(FakeDevice):
    """Fake timings that depend only on the tile."""

    def calls(self, target: Target, device: str) -> list[Callable[[], None]]:
        def call() -> None:
            config = config_of(target)
            self.now += 1e-3 * (config.stages + (10 if config.block_q == 64 else 0)) * target.dim / 64

        return [call, call]


def test_the_fastest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device, before = TiledDevice(), config_of(FORWARD)
    monkeypatch.setattr(tune, "calls", device.calls)
    configs = [Config(64, 64, 4, 1), Config(128, 64, 4, 2), Config(128, 64, 4, 3)]
    found = tune.times(Target("forward", "bfloat16", 64), configs, device, 3, random.Random(0))
    assert found == pytest.approx(dict(zip(configs, (11e-3, 2e-3, 3e-3), strict=True)))
    assert config_of(FORWARD) == before  # nothing is left changed


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> records.Record:
    """A run where tiles of 64 keys are wrong."""
    device = TiledDevice()
    monkeypatch.setattr(tune, "calls", device.calls)

    def check_here(target: str, jobs: Any, *, done: Any, **_: Any) -> list[Any]:
        assert target == "flashtile.lab.bench.tune:check"
        answers = [{"rejected": "wrong" if job["config"][1] == 64 and not job["today"] else None} for job in jobs]
        for n, job in enumerate(jobs, 1):
            done(job, n)
        return answers

    monkeypatch.setattr(workers, "run", check_here)
    wanted = [*candidates.targets(["forward"], ["bfloat16"]), Target("dq", "float32", 64)]
    saved: list[int] = []
    found = tune.run(device, HOPPER, wanted, rounds=2, save=lambda record: saved.append(len(record["measurements"])))
    assert saved == [1, 2, 3, 4, 4]
    return json.loads(json.dumps(found))


def test_a_run_writes_a_record(record: records.Record) -> None:
    first = record["measurements"][0]
    assert (first["kernel"], first["dtype"], first["dim"]) == ("forward", "bfloat16", 64)
    assert first["today"] == list(config_of(Target("forward", "bfloat16", 64)))
    reasons = {tuple(c["config"]): c["why_not"] for c in first["candidates"]}
    assert all((why == "wrong") == (c[1] == 64 and list(c) != first["today"]) for c, why in reasons.items())
    timed = {tuple(c["config"]): c["seconds"] for c in first["candidates"] if c["seconds"] is not None}
    assert first["best_seconds"] == min(timed.values()) == timed[tuple(first["best"])] and len(timed) > 3
    assert all((c["seconds"] is None) == (c["why_not"] is not None) for c in first["candidates"])


def test_rows_can_be_pasted_into_the_table(record: records.Record) -> None:
    measured = eval("{" + tables.rows(record) + "}", {"Config": Config})
    best = {(m["kernel"], m["dim"]): Config(*m["best"]) for m in record["measurements"] if m["dtype"] == "bfloat16"}
    assert measured[9, 2] == {"forward": {dim: best["forward", dim] for dim in candidates.DIMS}}
    assert set(measured[9, 4]) == {"dq"} and set(measured) == {(9, 2), (9, 4)}


def test_programs_per_processor_are_shown(record: records.Record) -> None:
    best = Config(16, 64, 2, 3, programs=2)
    record["measurements"] = [record["measurements"][0] | {"kernel": "decode-short", "dim": 128, "best": list(best)}]
    measured = eval("{" + tables.rows(record) + "}", {"Config": Config})
    assert measured == {(9, 2): {"decode-short": {128: best}}}
    assert tables.short(best) == "16x64 w2 s3 p2" and tables.short(Config(16, 64, 2, 3, True)) == "16x64 w2 s3 tma"


def test_fields_of_old_tiles_are_shown_by_name() -> None:
    fields = ("block_q", "block_k", "warps", "stages", "descriptors", "registers")
    assert tables.short([64, 64, 4, 3, True, 128], fields) == "64x64 w4 s3 tma registers=128"
    assert tables.short([64, 64, 4, 3, True, None], fields) == "64x64 w4 s3 tma"


STORED = sorted((ROOT / "benchmarks" / "records").glob("tune*.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_records_are_read_by_their_fields(path: Path) -> None:
    record = records.read(path)
    assert "None" not in table.render(record) + table.details(record)
    assert eval("{" + tables.rows(record) + "}", {"Config": Config})


def test_it_can_be_shown(record: records.Record) -> None:
    assert "| forward | bfloat16 | 64 | 128x" in table.render(record)
    assert "| wrong |" in table.details(record) and "fake" in table.render(record)


def test_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "run", lambda target, jobs, **_: [{"failed": "no time was left"} for _ in jobs])
    found = tune.run(TiledDevice(), HOPPER, [FORWARD], seconds=0)
    assert found["left_out"] == [FORWARD.name] and not found["measurements"]


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel, two candidates, on the real device: compiled in a worker, checked, timed."""
    from flashtile.lab.bench.gpu.device import Cuda, missing

    if reason := missing():
        pytest.skip(reason)
    monkeypatch.setattr(tune, "candidates", lambda *_: [Config(64, 32, 4, 2), Config(64, 64, 4, 2)])
    found = tune.run(Cuda(), candidates.limits(), [Target("forward", "bfloat16", 64)], rounds=2, count=2)
    (row,) = found["measurements"]
    assert [c["why_not"] for c in row["candidates"]] == [None] * len(row["candidates"])
    assert all(c["seconds"] > 0 for c in row["candidates"])
    assert all(c["registers"] for c in row["candidates"] if c["config"] != row["today"])
