"""flashtile bench: early errors, a record and a table, and exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("torch")

from typer.main import get_command
from typer.testing import CliRunner

from flashtile.lab.bench import candidates, records, suite, tune
from flashtile.lab.bench.gpu import ceilings, device, io, ncu, peers, precompile, rows
from flashtile.lab.bench.gpu.peers import CUDNN, FLEX, OURS
from flashtile.lab.cli import bench
from flashtile.lab.cli.app import app
from tests.lab.bench.gpu.fakes import FakeDevice, one_thread, row_of, small_ceilings
from tests.lab.bench.gpu.test_io import profiled_as_predicted


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == code, result.output
    return result


def error_of(*arguments: str) -> str:
    """The one line of error for these arguments."""
    (line,) = (line for line in run(*arguments, code=2).stderr.splitlines() if line.startswith("Error: "))
    return line.removeprefix("Error: Invalid value: ")


RECORDS = Path(__file__).parents[3] / "benchmarks" / "records"
CPU = records.new("cpu", quick=True, threads=1)
NO_RECORDS = {
    "a list": [CPU],
    "no fields": {"schema": records.SCHEMA},
    "another schema": CPU | {"schema": 999},
    "another suite": CPU | {"suite": "moon"},
    "no threads": {name: x for name, x in CPU.items() if name != "threads"},
    "rows of another kind": CPU | {"measurements": 5},
    "a hollow one": CPU | {"machine": {}, "measurements": [{"times": {}}]},
}


@pytest.mark.parametrize("way", [(), ("--details",), ("--into", "README.md"), ("--json",)])
@pytest.mark.parametrize("what", ["no JSON", *NO_RECORDS])
def test_a_malformed_record_is_refused_by_name_for_every_output(
    tmp_path: Path, what: str, way: tuple[str, ...]
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(NO_RECORDS[what]) if what in NO_RECORDS else "hello")
    assert error_of("table", str(path), *way).startswith(f"RECORD: {path}: expected a ")


def test_a_table_goes_into_a_document_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    records.write(CPU, path)
    missing = tmp_path / "nope.md"
    assert error_of("table", str(path), "--into", str(missing)) == f"--into: {missing}: No such file or directory"
    assert error_of("table", str(path), "--into", str(tmp_path)).startswith(f"--into: {tmp_path}: ")
    unmarked = tmp_path / "unmarked.md"
    unmarked.write_text("no place")
    assert error_of("table", str(path), "--into", str(unmarked)).startswith(f"--into: {unmarked}: expected a line")


@pytest.mark.parametrize("command", ["cpu", "gpu", "tune", "io"])
def test_nothing_is_measured_if_the_record_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    def measure(*_: Any, **__: Any) -> Any:
        raise AssertionError("too late")

    monkeypatch.setattr(suite, "run", measure)
    monkeypatch.setattr(device, "missing", measure)
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "deep" / "r.json"
    assert error_of(command, "--output", str(path)) == f"--output: cannot write {path}: Not a directory"
    assert error_of(command, "--output", str(tmp_path)) == f"--output: expected a file, got a folder: {tmp_path}"


def test_checking_the_output_path_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "missing", lambda: "no GPU")
    run("gpu", "--output", str(tmp_path / "deep" / "r.json"), code=3)
    assert list(tmp_path.iterdir()) == []


def test_names_with_commas_are_quoted() -> None:
    listed = ", ".join(f"'{name}'" for name in peers.NAMES)
    assert error_of("gpu", "--peers", "moon") == f"--peers: expected one of {listed}, got 'moon'"
    group: Any = get_command(bench.app)
    (option,) = (option for option in group.commands["gpu"].params if "--peers" in option.opts)
    assert listed in option.help


@pytest.mark.parametrize("command", ["gpu", "tune", "io"])
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(device, "missing", lambda: "torch sees no CUDA device")
    assert "torch sees no CUDA device" in run(command, code=3).stderr


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    assert device.missing() == "this torch was built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.missing() == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.missing() is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A fake device, two peers, one of them slower than ours, and two tiny rows."""
    fake = FakeDevice()
    monkeypatch.setenv(peers.FA4_CACHE, "0")
    monkeypatch.setattr(device, "missing", lambda: None)
    monkeypatch.setattr(device, "Cuda", lambda: fake)
    here = [fake.peer(OURS, 1e-3), fake.peer(CUDNN, 2e-3), fake.peer(FLEX, 3e-3, fails="no kernel")]
    monkeypatch.setattr(
        peers, "available", lambda wanted: ([p for p in here if not wanted or p.name in wanted], {"other": "not here"})
    )
    monkeypatch.setattr(precompile, "compile_ahead", lambda *_, **__: {"a row": "too long"})
    monkeypatch.setattr(rows, "ROWS", tuple(row_of(f"train forward D64 {mask}") for mask in ("full", "causal")))
    for name, ceiling in small_ceilings(fake).items():
        monkeypatch.setattr(ceilings, name, lambda _, ceiling=ceiling: ceiling)
    with one_thread():
        yield fake


def test_gpu_writes_a_record_and_a_table(gpu: FakeDevice, tmp_path: Any) -> None:
    path = tmp_path / "gpu.json"
    result = run("gpu", "--quick", "--suite", "train", "--only", "full", "--output", str(path))
    record = records.read(path)
    assert record["suite"] == "gpu" and record["quick"] is True and record["rounds"] == 3
    assert [m["case"] for m in record["measurements"]] == [rows.ROWS[0].name]
    assert "none under 1.05" in result.stdout and f"| {CUDNN} |" in result.stdout
    for said in ("other: not compared, not here", "FlexAttention is absent: RuntimeError: no kernel", "too long"):
        assert said in result.stderr
    assert run("table", str(path)).stdout in result.stdout
    assert "ms" in run("table", str(path), "--details").stdout


def test_gpu_prints_json(gpu: FakeDevice, tmp_path: Any) -> None:
    path = tmp_path / "gpu.json"
    result = run("gpu", "--quick", "--peers", CUDNN, "--peers", OURS, "--json", "--output", str(path))
    assert json.loads(result.stdout) == records.read(path)
    assert set(json.loads(result.stdout)["measurements"][0]["times"]) == {OURS, CUDNN}


def test_gpu_stops_when_time_is_up(gpu: FakeDevice, tmp_path: Any) -> None:
    result = run("gpu", "--seconds", "0", "--output", str(tmp_path / "gpu.json"))
    assert f"{rows.ROWS[1].name}: left out, no time was left" in result.stderr


def test_gpu_resumes_a_run(gpu: FakeDevice, tmp_path: Any) -> None:
    path = str(tmp_path / "gpu.json")
    run("gpu", "--quick", "--only", "full", "--output", path)
    (before,) = records.read(tmp_path / "gpu.json")["measurements"]
    run("gpu", "--quick", "--resume", path, "--output", path)
    found = records.read(tmp_path / "gpu.json")["measurements"]
    assert [m["case"] for m in found] == [row.name for row in rows.ROWS] and found[0] == before
    result = run("gpu", "--resume", path, "--output", path, code=2)
    assert "--resume" in result.stderr and "quick differs" in result.stderr
    assert records.read(tmp_path / "gpu.json")["measurements"] == found
    assert "--resume" in run("gpu", "--resume", str(tmp_path / "none.json"), code=2).stderr
    tuned = records.FOLDER / "tune.json"
    assert "suite differs" in run("gpu", "--quick", "--resume", str(tuned), code=2).stderr


def test_gpu_lists_rows_it_cannot_run(gpu: FakeDevice, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No device here multiplies 8-bit tensors as they are."""
    wide = rows.ROWS[0]
    eight = replace(wide, case=replace(wide.case, dtype="float8_e4m3fn"))
    monkeypatch.setattr(rows, "ROWS", (eight, wide))
    path = tmp_path / "gpu.json"
    result = run("gpu", "--quick", "--output", str(path))
    assert f"{eight.name}: left out, gluon: it runs on cuda" in result.stderr
    assert [m["case"] for m in records.read(path)["measurements"]] == [wide.name]


def test_gpu_check_fails_if_a_bar_does(gpu: FakeDevice, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("gpu", "--quick", "--output", str(tmp_path / "gpu.json"), "--check")
    run(*arguments)
    monkeypatch.setattr(peers, "available", lambda wanted: ([gpu.peer(OURS, 2e-3), gpu.peer(FLEX, 1e-3)], {}))
    run(*arguments, code=1)
    run(*arguments[:-1])


@pytest.mark.parametrize(
    "arguments",
    [
        ("gpu", "--suite", "abacus"),
        ("gpu", "--peers", "abacus"),
        ("gpu", "--only", "abacus"),
        ("tune", "--kernel", "abacus"),
        ("tune", "--dtype", "int8"),
        ("tune", "--dim", "63"),
    ],
)
def test_wrong_usage_is_exit_code_2(gpu: FakeDevice, arguments: tuple[str, ...]) -> None:
    run(*arguments, code=2)


def test_tune_prints_rows_for_the_table(gpu: FakeDevice, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    fields = ["block_q", "block_k", "warps", "stages", "descriptors"]
    found = records.new("tune", False, rounds=1, device=gpu.describe(), fields=fields) | {"left_out": []}
    found["measurements"] = [
        {
            "kernel": "dq",
            "dtype": "bfloat16",
            "dim": 64,
            "today": [64, 64, 4, 3, True],
            "today_seconds": 2e-3,
            "best": [128, 64, 8, 3, True],
            "best_seconds": 1e-3,
            "candidates": [],
        }
    ]
    monkeypatch.setattr(candidates, "limits", lambda: candidates.Limits(1, True))
    monkeypatch.setattr(tune, "run", lambda *given, **_: seen.append(given) or found)
    path = tmp_path / "tune.json"
    result = run("tune", "--kernel", "dq", "--dtype", "bfloat16", "--dim", "64", "--output", str(path))
    assert seen[0][2] == [candidates.Target("dq", "bfloat16", 64)]
    assert '"dq": {64: Config(128, 64, 8, 3, True)},' in result.stdout and "| 0.500 |" in result.stdout
    assert records.read(path)["suite"] == "tune"
    assert "| 0.500 |" in run("table", str(path)).stdout


def test_io_needs_a_profiler(gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "find", lambda: None)
    assert "this needs NVIDIA's profiler ncu" in run("io", code=3).stderr
    assert "ncu: " in run("io", "--ncu", "/no/such/program", code=3).stderr

    def fail(*_: Any) -> Any:
        raise ncu.ProfilerError("no permission")

    monkeypatch.setattr(io, "run", fail)
    assert "ncu: no permission" in run("io", "--ncu", "x", code=3).stderr


def test_io_writes_a_record(gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(ncu, "find", lambda: "an ncu")
    measure = io.run
    monkeypatch.setattr(io, "run", lambda *given: measure(*given, profiled_as_predicted(1.0)))
    path = tmp_path / "io.json"
    assert "| D64" not in run("io", "--output", str(path)).stderr
    assert len(records.read(path)["measurements"]) == len(io.ENTRIES)
    assert "by tiles" in run("table", str(path)).stdout
    assert json.loads(run("io", "--output", str(path), "--json").stdout)["suite"] == "io"


@pytest.mark.parametrize("name", ["cpu", "gpu", "io", "tune"])
def test_every_record_here_has_something_to_print(name: str) -> None:
    found = json.loads(run("table", str(RECORDS / f"{name}.json"), "--json").stdout)
    assert found and all(isinstance(row, dict) for row in found)
