"""showcase.py: every contender is timed, none is above the roof, and a GPU has its own side."""

import pytest

from flashtile.cost.hardware import Rates
from flashtile.host import machine
from flashtile.lab.bench import cases, showcase
from flashtile.lab.bench.gpu import ceilings
from flashtile.lab.bench.timing import Timing, host_seconds
from flashtile.lab.bench.workload import NAIVE_NUMPY, NAIVE_TORCH, OURS, SDPA, Workload
from flashtile.lab.studies.study import to_dict

BEST = Rates(1e9, 1e9)


@pytest.fixture
def small(monkeypatch):
    case = cases.square(32, 16, naive=True)
    training = cases.square(32, 16, naive=True, direction=cases.TRAINING)
    monkeypatch.setattr(showcase, "CPU", (case, training, cases.square(1024, 16)))
    monkeypatch.setattr(showcase, "QUICK_SECONDS", 0.001)


def test_every_contender_is_timed(small):
    pytest.importorskip("torch")
    found = showcase.run(BEST, quick=True, threads=1)
    forward, training = found.cpu.rows
    assert set(forward.runs) == {OURS, SDPA, NAIVE_TORCH, NAIVE_NUMPY}
    assert set(training.runs) == {OURS, SDPA, NAIVE_TORCH} and training.flops > 3 * forward.flops
    assert found.threads == 1 and found.absent == {} and to_dict(found)["cpu"]["device"] == "CPU"


def test_it_works_without_torch(small, monkeypatch):
    monkeypatch.setattr(machine, "has", lambda package: False)
    found = showcase.run(BEST, quick=True, threads=1)
    assert set(found.absent) == {SDPA, NAIVE_TORCH}
    assert set(found.cpu.rows[0].runs) == {OURS, NAIVE_NUMPY}


def test_no_contender_is_above_the_roof():
    case = cases.square(64, 16)
    flops = 4 * 8 * 64 * 64 * 16
    timed = [showcase.Timed(case, {OURS: Timing((2e-6, 1e-6, 3e-6)), NAIVE_NUMPY: Timing((4e-6,))})]
    side = showcase._side("CPU", "cpu", Rates(1.0, 1e9), timed)
    assert side.rates == Rates(flops / 1e-6, 1e9)  # the fastest sample anyone had
    runs = side.rows[0].runs
    assert runs[OURS].utilisation == pytest.approx(0.5) and runs[NAIVE_NUMPY].utilisation == pytest.approx(0.25)
    roomy = showcase._side("CPU", "cpu", Rates(1e15, 1e9), timed)
    assert roomy.rates.flops == 1e15 and roomy.rows[0].runs[OURS].utilisation == pytest.approx(flops / 2e-6 / 1e15)


def test_storing_the_scores_means_fewer_flops_per_byte():
    case = cases.square(1024, 64)
    timed = [showcase.Timed(case, {OURS: Timing((1.0,)), NAIVE_NUMPY: Timing((1.0,))})]
    runs = showcase._side("CPU", "cpu", BEST, timed).rows[0].runs
    assert runs[NAIVE_NUMPY].intensity == pytest.approx(64 / 4, rel=0.1)  # 4 N^2 d over 4 N^2 numbers of 4 bytes
    assert runs[OURS].intensity > runs[NAIVE_NUMPY].intensity


class Device:
    """The CPU as a fake GPU."""

    name, cache = "cpu", 0

    def describe(self):
        return {"name": "A made-up GPU"}

    def seconds(self, call):
        return host_seconds(call)

    def growth(self, call):
        call()
        return 7


def test_a_gpu_has_its_own_side(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(ceilings.product, "__defaults__", (32,))
    monkeypatch.setattr(ceilings.copy, "__defaults__", (1 << 12,))
    given = [
        cases.square(64, 16, heads=2, kv_heads=2, dtype="bfloat16", naive=True, direction=direction)
        for direction in (cases.FORWARD, cases.TRAINING)
    ]
    side = showcase.on_gpu(Device(), given, quick=True)
    assert side.device == "A made-up GPU" and side.rates.flops > 0 and side.rates.bytes > 0
    for row in side.rows:
        assert set(row.runs) == {OURS, SDPA, NAIVE_TORCH}
        assert {run.grown for run in row.runs.values()} == {7} and row.dtype == "bfloat16"
    assert Workload(given[0], 1, "cpu").tensors["q"].dtype == torch.bfloat16


def test_a_contender_that_does_not_fit_is_left_out(monkeypatch):
    torch = pytest.importorskip("torch")

    class Small(Device):
        called = 0

        def growth(self, call):
            self.called += 1
            if self.called == 3:  # standard attention
                raise torch.OutOfMemoryError("no room")
            return super().growth(call)

    monkeypatch.setattr(ceilings.product, "__defaults__", (32,))
    monkeypatch.setattr(ceilings.copy, "__defaults__", (1 << 12,))
    case = cases.square(64, 16, dtype="bfloat16", naive=True)
    assert set(showcase.on_gpu(Small(), [case], quick=True).rows[0].runs) == {OURS, SDPA}


def test_the_cases_for_a_gpu_are_in_16_bits_and_both_directions():
    assert {case.dtype for case in showcase.GPU} == {"bfloat16"}
    assert {case.direction for case in showcase.GPU} == {cases.FORWARD, cases.TRAINING}
