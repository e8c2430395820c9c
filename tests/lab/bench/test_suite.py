"""suite.py, cases.py and workload.py: every contender computes the same result, and a run writes a whole record."""

import json
from dataclasses import replace

import numpy as np
import pytest

from flashtile.host import machine
from flashtile.lab.bench import cases, memory, suite, workload
from flashtile.numerics.dtypes import widen

SMALL_CASES = {
    group.name: replace(
        case, n_q=min(case.n_q, 96), n_k=96, batch=min(case.batch, 3), naive=case == cases.square(512, 64, naive=True)
    )
    for group in cases.CPU
    for case in group.cases[:1]
} | {"packed": replace(cases.TINY[0], batch=3, entry="packed")}


def plain(x):
    if isinstance(x, tuple):
        return np.concatenate([plain(y).ravel() for y in x if y is not None])
    if not isinstance(x, np.ndarray):
        x = x.detach().float().numpy()
    return widen(x, np.float64)


@pytest.mark.parametrize("name", SMALL_CASES)
def test_contenders_agree(name):
    pytest.importorskip("torch")
    case = SMALL_CASES[name]
    calls = workload.contenders(workload.Workload(case, 2))
    assert list(calls)[:2] == [workload.OURS, workload.SDPA]
    results = {who: plain(call()) for who, call in calls.items()}
    if case.options.get("dropout"):  # everyone rolls dice of their own
        return
    tolerance = 1e-4 if case.dtype == "float32" else 0.06
    for who, result in results.items():
        np.testing.assert_allclose(result.ravel(), results[workload.SDPA].ravel(), atol=tolerance, rtol=0, err_msg=who)


@pytest.mark.parametrize("direction", [cases.FORWARD, cases.TRAINING])
def test_without_torch_ours_runs_on_numpy_and_peers_are_reported(monkeypatch, direction):
    monkeypatch.setattr(machine, "has", lambda package: False)
    case = cases.square(32, 16, naive=True, direction=direction)
    calls = workload.contenders(workload.Workload(case, 1))
    naive = [workload.NAIVE_NUMPY] if direction == cases.FORWARD else []
    assert list(calls) == [workload.OURS, *naive]
    assert set(workload.absent()) == {workload.SDPA, workload.NAIVE_TORCH}
    for call in calls.values():
        call()


def test_group_names_are_unique_and_groups_have_short_forms():
    assert len(set(cases.GROUPS)) == len(cases.GROUPS)
    for group in cases.CPU:
        assert cases.quick(group).cases and set(map(str, cases.quick(group).cases)) <= set(map(str, group.cases))


def test_the_bars_are_as_agreed():
    bars = {g.name: (g.bar, g.reach, g.worst_bar) for g in cases.CPU}
    assert bars == {
        "full": (0.85, 0.78, 0.97),
        "causal": (0.66, 0.58, 0.85),
        "training": (0.82, 0.75, None),
        "training-causal": (0.64, 0.55, None),
        "decode": (0.75, 0.65, None),
        "decode-gqa": (0.30, 0.20, None),
        "decode-short": (0.90, None, 1.0),
        "bfloat16": (0.85, 0.75, 1.0),
        "bfloat16-training": (0.95, 0.85, 1.0),
        "float16": (0.85, 0.75, 1.0),
        "float16-training": (0.95, 0.85, 1.0),
        "bias": (0.95, None, None),
        "window": (0.30, None, None),
        "dropout": (0.40, None, None),
        "tiny": (0.75, None, 1.0),
        "small": (0.75, 0.6, None),
        "small-numpy": (0.75, 0.6, None),
        "small-beside": (0.85, None, None),
    }


def test_a_run_writes_a_record(monkeypatch):
    group = replace(cases.CPU[0], cases=(cases.square(32, 16), cases.square(48, 16)))
    tiny = tuple(cases.square(n, 16, heads=1, kv_heads=1) for n in (16, 32))
    monkeypatch.setattr(suite, "CPU", (group,))
    monkeypatch.setattr(suite, "SCALING", tiny)
    monkeypatch.setattr(suite, "MEMORY", cases.square(256, 16, heads=1, kv_heads=1))
    seen = []
    record = suite.run(short=True, threads=1, progress=lambda *a: seen.append(a))
    assert json.loads(json.dumps(record))["threads"] == 1
    groups = [row["group"] for row in record["measurements"]]
    assert groups == ["full", "full", "memory", "memory", "scaling", "scaling"]
    assert [row["group"] for row in record["summary"]] == ["full", "memory", "scaling"]
    assert [done for _, done, _ in seen] == [0, 1, 2, 3, 4, 5, 6] and {total for *_, total in seen} == {6}
    first = record["measurements"][0]
    assert first["flops"] == 4 * 8 * 32 * 32 * 16 and first["backend"]
    assert first["times"][workload.OURS]["rounds"] >= 3
    if machine.has("torch"):
        mean = np.sqrt(record["measurements"][0]["ratio"] * record["measurements"][1]["ratio"])
        assert record["summary"][0]["value"] == pytest.approx(mean)


def test_a_missed_bar_is_reported():
    group = replace(cases.CPU[0], bar=0.5, worst_bar=0.8)
    assert suite._summary(group, [{"ratio": 0.4}, {"ratio": 0.5}])["holds"] is True
    assert suite._summary(group, [{"ratio": 0.1}, {"ratio": 0.9}])["holds"] is False
    assert suite._summary(group, [{"ratio": 0.6}])["holds"] is False
    assert suite._summary(group, [{}])["holds"] is None


def test_naive_attention_is_among_the_compared():
    assert any(case.naive for case in SMALL_CASES.values())


def test_growth_includes_allocations():
    grown = memory.measure(lambda: np.ones(1 << 22))
    if grown is None:
        pytest.skip("this system does not tell")
    assert 30 << 20 < grown < 40 << 20


def test_a_failing_measurement_names_the_contender():
    with pytest.raises(RuntimeError, match="memory of nobody"):
        memory.growth("nobody", cases.MEMORY, cases.FORWARD, 1)
