"""gpu/bench.py: contenders are timed in random order and recorded, and no failure stops the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashtile.lab.bench.gpu import (  # noqa: E402
    bench,
    ceilings,
    device,
)
from flashtile.lab.bench.gpu.bench import Bench  # noqa: E402
from flashtile.lab.bench.gpu.peers import CUDNN, FLEX, OURS, PORTABLE, WIDE, Peer, UnfitError  # noqa: E402
from flashtile.lab.bench.table import render  # noqa: E402
from flashtile.lab.bench.tables.gpu import caption, details  # noqa: E402
from tests.lab.bench.gpu.fakes import FakeDevice, one_thread, row_of, small_ceilings  # noqa: E402

COSTS = {OURS: 1e-3, CUDNN: 2e-3, FLEX: 3e-3}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    found = FakeDevice()
    monkeypatch.setattr(bench, "GRAPH_CALLS", 4)
    monkeypatch.setattr(bench, "ENQUEUED", 3)
    for name, ceiling in small_ceilings(found).items():
        monkeypatch.setattr(ceilings, name, lambda _, ceiling=ceiling: ceiling)
    with one_thread():
        yield found


def bench_of(fake: FakeDevice, **more: Any) -> Bench:
    return Bench(fake, [fake.peer(name, cost) for name, cost in COSTS.items()], rounds=4, **more)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_training_rows(fake: FakeDevice, direction: str) -> None:
    row = row_of(f"train {direction} D64 full")
    found = json.loads(json.dumps(bench_of(fake).measure(row)))
    assert {name: t["median_s"] for name, t in found["times"].items()} == pytest.approx(COSTS)
    assert found["ratios"][FLEX]["value"] == pytest.approx(3) and found["ratios"][CUDNN]["value"] == pytest.approx(2)
    assert found["rates"][CUDNN] == pytest.approx(row.flops / 2e-3) and found["ceiling"] == pytest.approx(1e9)
    assert found["differences"] == {CUDNN: 0, FLEX: 0} and found["absent"] == {}
    assert found["times"][OURS]["rounds"] == 4 and found["backend"] in ("native", "tiles")


def test_a_step_is_one_call(fake: FakeDevice) -> None:
    row = row_of("train step")
    found = bench_of(fake).measure(row)
    both = {name: 2 * cost for name, cost in COSTS.items()}  # a pass each way
    assert {name: t["median_s"] for name, t in found["times"].items()} == pytest.approx(both)
    assert found["rates"][CUDNN] == pytest.approx(row.flops / 4e-3) and found["differences"] == {CUDNN: 0, FLEX: 0}


def test_samples_are_long_enough_and_in_random_order(fake: FakeDevice) -> None:
    bench_of(fake).measure(row_of("train forward D64 full"))
    rounds = fake.samples[-16:]  # four of four: before them, everyone is timed to see how often a sample needs it
    assert {(names[0], len(names)) for names in rounds} == {(OURS, 10), (CUDNN, 5), (FLEX, 3), ("ceiling", 10)}
    orders = [tuple(names[0] for names in rounds[n : n + 4]) for n in range(0, 16, 4)]
    assert all(len(set(order)) == 4 for order in orders) and len(set(orders)) > 1
    first, fake.samples = fake.samples, []
    bench_of(fake).measure(row_of("train forward D64 full"))
    assert fake.samples == first  # random, and the same in every run


def test_a_contender_that_raises_is_absent_with_its_reason(fake: FakeDevice) -> None:
    run = bench_of(fake)
    run.peers = [*run.peers, fake.peer("broken", 1.0, fails="no such kernel")]
    found = run.measure(row_of("train forward D64 full"))
    assert found["absent"] == {"broken": "RuntimeError: no such kernel"} and "broken" not in found["times"]


def test_a_contender_that_does_not_support_a_row_is_absent(fake: FakeDevice) -> None:
    def build(row: Any, given: Any) -> Any:
        raise UnfitError("it takes no window")

    run = bench_of(fake)
    run.peers = [*run.peers, Peer("narrow", build)]
    assert run.measure(row_of("train forward D64 full"))["absent"] == {"narrow": "it takes no window"}


def test_peers_are_timed_even_if_ours_fails(fake: FakeDevice) -> None:
    run = Bench(fake, [fake.peer(OURS, 1.0, fails="oh"), fake.peer(CUDNN, 2e-3)], rounds=2)
    found = run.measure(row_of("train forward D64 full"))
    assert found["ratios"] == {} and set(found["times"]) == {CUDNN} and OURS in found["absent"]


def test_a_wrong_result_is_recorded(fake: FakeDevice) -> None:
    run = Bench(fake, [fake.peer(OURS, 1e-3, off=0.1), fake.peer(CUDNN, 1e-3)], rounds=2)
    assert run.measure(row_of("train forward D64 full"))["differences"][CUDNN] == pytest.approx(0.1, abs=0.01)
    nan = torch.tensor([float("nan")])
    assert bench.difference([nan], [nan]) == float("inf")


def test_a_window_is_compared_with_no_window(fake: FakeDevice) -> None:
    run = bench_of(fake)
    run.peers = [*run.peers, fake.peer(PORTABLE, 2e-3)]
    found = run.measure(row_of("train forward window1024"))
    assert {name: t["median_s"] for name, t in found["unwindowed"].items()} == pytest.approx(
        {OURS: 1e-3, PORTABLE: 2e-3}
    )
    assert found["window"] == 1024 and set(found["times"]) == set(found["rates"]) == {*COSTS, PORTABLE}


def test_decode_uses_graphs_and_cycles_through_inputs(fake: FakeDevice) -> None:
    row = row_of("decode B16")
    fake.cache = row.kv_bytes // 2  # two sets are four times as much
    found = bench_of(fake).measure(row)
    assert {name: t["median_s"] for name, t in found["times"].items()} == pytest.approx(COSTS)
    assert found["rates"][OURS] == pytest.approx(row.kv_bytes / 1e-3) and found["ceiling"] == pytest.approx(1e9)
    assert found["shares"][OURS] == pytest.approx(row.kv_bytes / 1e-3 / 1e9) and found["eager"] == {}
    assert set(found["host"]) == set(COSTS)
    sizes = {len(names) for names in fake.samples if OURS in names}
    assert sizes == {1, 4, 8}  # a call to see how long it takes, a graph of four, once and twice


def test_a_graph_is_no_longer_than_two_samples(fake: FakeDevice) -> None:
    run = Bench(fake, [fake.peer(OURS, 1e-3), fake.peer(FLEX, 0.02)], rounds=4)
    row = row_of("decode B16")
    fake.cache = row.kv_bytes // 4  # one set
    found = run.measure(row)
    assert {len(names) for names in fake.samples if FLEX in names} == {1}
    assert found["times"][FLEX]["median_s"] == pytest.approx(0.02) and found["eager"] == {}
    assert fake.log.count(FLEX) < 20  # in host time too


def test_a_contender_that_cannot_be_captured_is_timed_eagerly(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: Any) -> Any:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(fake, "captured", refuse)
    found = bench_of(fake).measure(row_of("decode B16"))
    assert found["eager"] == dict.fromkeys(COSTS, "RuntimeError: not while capturing")
    assert {name: t["median_s"] for name, t in found["times"].items()} == pytest.approx(COSTS)


def test_input_sets() -> None:
    assert (
        bench.input_sets(1 << 30, 1 << 20) == 1 and bench.input_sets(3, 6) == 8 and bench.input_sets(1, 1 << 20) == 64
    )


def test_small_calls_use_the_host_clock(fake: FakeDevice) -> None:
    found = bench_of(fake).measure(row_of("small"))
    assert set(found["host"]) == set(found["times"]) == set(COSTS)
    assert 0 < found["host"][OURS]["median_s"] < 1


def test_memory(fake: FakeDevice) -> None:
    fake.grown = 77
    row = row_of("memory backward")
    found = bench_of(fake).measure(row)
    rows = row.case.batch * row.case.heads * row.case.n_q
    assert found["grown"] == dict.fromkeys(COSTS, 77) and found["needed"] == 4 * rows + 4 * rows * row.case.dim
    assert bench_of(fake).measure(row_of("memory forward"))["needed"] == 4 * rows


def test_shared_results_count_once() -> None:
    x = torch.zeros(10)
    assert device.returned(x) == 40 and device.returned((x, x[2:], torch.zeros(3))) == 52


def test_the_record_of_a_run_can_be_shown(fake: FakeDevice) -> None:
    rows = [
        row_of(words)
        for words in ("train forward D64 full", "train backward D64 causal", "decode B1", "small", "memory forward")
    ]
    saved: list[int] = []
    steps: list[tuple[str, int, int]] = []
    record = bench.run(
        bench_of(fake),
        rows,
        absent={"other": "not here"},
        progress=lambda *step: steps.append(step),
        save=lambda record: saved.append(len(record["measurements"])),
    )
    record = json.loads(json.dumps(record))
    assert saved == [1, 2, 3, 4, 5, 5] and [done for _, done, _ in steps] == [0, 1, 2, 3, 4, 5]
    assert record["suite"] == "gpu" and record["device"]["name"] == "fake" and record["absent"] == {"other": "not here"}
    assert [m["case"] for m in record["measurements"]] == [row.name for row in rows] and not record["failed"]
    text = render(record)
    assert "fake, CUDA 0" in text and "| forward B2 H4/2 N8x16 D8 full | 0 | 0 | 0 | 2.00 |" in text
    assert "| a small call | host time, us |" in text
    assert "| peak memory beyond inputs and results, MiB |" in text
    assert "1 (1 to 1)" in details(record)
    widths = [{line.count("|") for line in part.splitlines()} for part in text.split("\n\n")[1:]]
    assert all(len(width) == 1 for width in widths)  # no cell has a bar of its own


def test_absent_peers_are_reported(fake: FakeDevice) -> None:
    rows = [row_of("train forward D64 full")]
    assert "Not compared" not in caption(bench.run(bench_of(fake), rows))
    absent = {"A": "a has no attention function", "B": "b cannot be imported: ModuleNotFoundError: No module named 'b'"}
    said = caption(bench.run(bench_of(fake), rows, absent=absent))
    assert said.endswith(" Not compared: A (a has no attention function), B (b cannot be imported).")


def test_8_bits_have_a_separate_table(fake: FakeDevice) -> None:
    peers = [fake.peer(OURS, 1e-3), fake.peer(WIDE, 1.5e-3), fake.peer(CUDNN, 2e-3)]
    rows = [row_of("train forward D64 full"), row_of("train forward float8_e4m3fn D64 full")]
    record = bench.run(Bench(fake, peers, rounds=2), rows, unfit={"a row": "no kernel"})
    assert record["unfit"] == {"a row": "no kernel"} and not record["failed"]
    text = render(json.loads(json.dumps(record)))
    assert "bfloat16 and float8_e4m3fn, medians of 2 rounds" in text
    tables = [part for part in text.split("\n\n") if part.startswith("| TFLOP/s")]
    heads = [part.splitlines()[0] for part in tables]
    assert [head.split("|")[1].strip() for head in heads] == ["TFLOP/s", "TFLOP/s, float8_e4m3fn"]
    assert "/ best peer | / bfloat16 |" in heads[1] and [len(part.splitlines()) for part in tables] == [3, 3]
    assert tables[1].splitlines()[2].endswith("| 2.00 | 1.50 |")


def test_absences_are_grouped(fake: FakeDevice) -> None:
    run = bench_of(fake)
    run.peers = [*run.peers, fake.peer("broken", 1.0, fails="no such kernel")]
    record = bench.run(run, [row_of("train forward D64 full"), row_of("train forward D64 causal")])
    assert bench.absences(record) == {
        ("broken", "RuntimeError: no such kernel"): [m["case"] for m in record["measurements"]]
    }


def test_a_failing_row_is_reported_and_the_rest_continues(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = bench_of(fake), Bench.measure
    broken = row_of("train backward D64 full")

    def measure(self: Bench, row: Any) -> Any:
        if row is broken:
            raise RuntimeError("device lost")
        return plain(self, row)

    monkeypatch.setattr(Bench, "measure", measure)
    record = bench.run(run, [broken, row_of("train forward D64 full")])
    assert record["failed"] == {broken.name: "RuntimeError: device lost"} and len(record["measurements"]) == 1
    assert record["summary"][-1]["group"] == "failed" and record["summary"][-1]["holds"] is False


def test_time_runs_out_between_rows(fake: FakeDevice) -> None:
    rows = [row_of(words) for words in ("train forward D64 full", "train forward D64 causal", "small")]
    clock = iter([0.0, 1.0, 5.0, 11.0])
    record = bench.run(bench_of(fake), rows, seconds=10, now=lambda: next(clock))
    assert [m["case"] for m in record["measurements"]] == [rows[1].name, rows[2].name]  # as given
    assert record["left_out"] == [rows[0].name]  # the most to do
    assert "Left out for lack of time: 1 rows." in render(record)


def test_an_unfinished_run_can_be_resumed(fake: FakeDevice) -> None:
    """Rows of the earlier run stay, and the others are measured; the record is that of a single run."""
    rows = [row_of(words) for words in ("train forward D64 full", "train forward D64 causal", "small")]
    clock = iter([0.0, 1.0, 5.0, 11.0])
    first = json.loads(json.dumps(bench.run(bench_of(fake), rows, seconds=10, now=lambda: next(clock))))
    fake.samples = []
    record = bench.run(bench_of(fake), rows, earlier=first)
    assert [m["case"] for m in record["measurements"]] == [row.name for row in rows] and record["left_out"] == []
    assert record["measurements"][1:] == first["measurements"]
    whole = bench.run(bench_of(fake), rows)
    assert [bar["group"] for bar in record["summary"]] == [bar["group"] for bar in whole["summary"]]
    fake.samples = []
    assert bench.run(bench_of(fake), rows, earlier=whole)["measurements"] == whole["measurements"] and not fake.samples


def test_failed_and_omitted_rows_survive_a_resume(fake: FakeDevice) -> None:
    """A run may be resumed with other rows."""
    full, causal, small = (row_of(words) for words in ("train forward D64 full", "train forward D64 causal", "small"))
    first = bench.run(bench_of(fake), [small])
    first |= {"failed": {full.name: "device lost"}, "unfit": {"old": "no"}, "left_out": [causal.name, full.name]}
    record = bench.run(bench_of(fake), [causal], unfit={"new": "no"}, earlier=first)
    assert record["failed"] == {full.name: "device lost"} and record["summary"][-1]["holds"] is False
    assert record["unfit"] == {"new": "no", "old": "no"} and record["left_out"] == [full.name]
    assert {m["case"] for m in record["measurements"]} == {small.name, causal.name}
    again = bench.run(bench_of(fake), [full], earlier=record)
    assert again["failed"] == {} and again["left_out"] == []


@pytest.mark.parametrize("changed", [{"rounds": 5}, {"quick": True}, {"peers": []}, {"machine": {}}, {"device": {}}])
def test_a_run_of_another_kind_cannot_be_resumed(fake: FakeDevice, changed: dict[str, Any]) -> None:
    rows = [row_of("small")]
    earlier = bench.run(bench_of(fake), rows) | changed
    with pytest.raises(ValueError, match=rf"^{next(iter(changed))}\b.* differs: "):
        bench.run(bench_of(fake), rows, earlier=earlier)


def test_ceilings_count_their_work() -> None:
    product = ceilings.product("cpu", 4)
    assert product.call().shape == (4, 4) and product.amount == 128
    copy = ceilings.copy("cpu", 100)
    assert copy.call().shape == (100,) and copy.amount == 200


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Every kind of row, with tiny sizes, on the real device."""
    from flashtile.lab.bench.gpu import peers

    if device.missing():
        pytest.skip(device.missing())
    here, absent = peers.available([OURS, CUDNN, peers.SDPA_FLASH])
    assert not absent
    run = Bench(device.Cuda(), here, rounds=2, sample=1e-4)
    passes = ("train forward N1024 D64 full", "train backward N1024 D64 causal", "train step N4096")
    small = [row_of(words, _fit) for words in passes]
    record = bench.run(run, [*small, row_of("decode B16", _fit), row_of("small", _fit), row_of("memory forward", _fit)])
    assert record["failed"] == {} and record["measurements"][3]["eager"] == {}
    for row in record["measurements"]:
        assert OURS not in row["absent"], row
        assert all(x < 0.02 for x in row.get("differences", {}).values()), row
        assert all(t["median_s"] > 0 for t in row.get("times", {}).values())
    assert record["measurements"][5]["grown"][OURS] <= record["measurements"][5]["needed"] + (1 << 20)
    assert render(record)


@pytest.mark.gpu
def test_8_bits_on_a_gpu() -> None:
    from flashtile.lab.bench.gpu import bars, peers

    row = row_of("train forward float8_e4m3fn N1024 D128 causal", _fit)
    if reason := device.missing() or row.objection("cuda"):
        pytest.skip(reason)
    here, _ = peers.available([WIDE])
    record = bench.run(Bench(device.Cuda(), here, rounds=2, sample=1e-4), [row])
    (found,) = record["measurements"]
    assert found["backend"] == "gluon" and set(found["times"]) == {OURS, WIDE}
    assert 0 < found["differences"][WIDE] < bars.SAME_IN_8_BITS


def _fit(row: Any) -> Any:
    from dataclasses import replace

    return replace(row, case=replace(row.case, n_k=min(row.case.n_k, 1024), n_q=min(row.case.n_q, 1024)))
