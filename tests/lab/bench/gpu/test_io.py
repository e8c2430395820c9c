"""gpu/ncu.py and gpu/io.py: the profiler's table is parsed, and its bytes are compared with the tiles'."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashtile.band import Band  # noqa: E402
from flashtile.cost import traffic  # noqa: E402
from flashtile.lab.bench import records  # noqa: E402
from flashtile.lab.bench.gpu import io, ncu  # noqa: E402
from flashtile.lab.bench.gpu.io import ENTRIES, METRICS, OURS, STANDARD, Entry  # noqa: E402
from flashtile.lab.bench.gpu.ncu import Kernel, ProfilerError  # noqa: E402
from flashtile.lab.bench.table import details, put_into, render  # noqa: E402
from tests.lab.bench.gpu.fakes import FakeDevice, one_thread  # noqa: E402

COLUMNS = ("ID", "Process ID", "Kernel Name", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value")
SPIN = "at::cuda::<unnamed>::spin_kernel(long)"


def line(number: int, kernel: str, metric: str, value: str) -> str:
    return quoted(str(number), "7", kernel, "9.0", "Command line profiler metrics", metric, "byte", value)


def quoted(*cells: str) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def talk(*lines: str) -> str:
    begin, end = ("==PROF== Connected to process 7", quoted(*COLUMNS)), ("==PROF== Disconnected from process 7", "")
    return "\n".join([*begin, *lines, *end])


def test_the_table_is_read() -> None:
    name = "a<int, 2>"
    text = talk(line(0, name, "x.sum", "1,234,567"), line(0, name, "y.sum", "n/a"), line(1, "b", "x.sum", "5"))
    assert ncu.parse(text) == [Kernel(name, {"x.sum": 1234567.0}), Kernel("b", {"x.sum": 5.0})]
    assert ncu.parse("==PROF== nothing\n") == []


def test_kernels_belong_to_the_mark_before_them() -> None:
    names = ["before", SPIN, "a", "b", SPIN, "c", SPIN]
    groups = ncu.by_mark(Kernel(name, {}) for name in names)
    assert [[kernel.name for kernel in group] for group in groups] == [["a", "b"], ["c"], []]


def script(folder: Path, body: str) -> str:
    """A fake profiler."""
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} - \"$@\" <<'END'\nimport sys\n{body}\nEND\n")
    path.chmod(0o755)
    return str(path)


def test_the_profiler_gets_the_metrics_and_the_module(tmp_path: Path) -> None:
    text = talk(line(0, "a", "x.sum", "5"))
    program = script(
        tmp_path,
        f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({text!r})\nprint(*sys.argv[1:])",
    )
    kernels, said = ncu.profile(program, "some.module", ("x.sum", "y.sum"))
    assert kernels == [Kernel("a", {"x.sum": 5.0})]
    assert "--profile-from-start off --metrics x.sum,y.sum" in said and said.endswith("-m some.module\n")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM - no permission\\nmore'); sys.exit(1)", "==ERROR== ERR_NVGPUCTRPERM"),
        ("print('Traceback\\nValueError: no'); sys.exit(1)", "ValueError: no"),
        ("", "it profiled no kernel"),
    ],
)
def test_profiler_errors_are_reported(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises(ProfilerError, match=told):
        ncu.profile(script(tmp_path, body), "some.module", ("x.sum",))


def test_the_shapes_are_as_agreed() -> None:
    ours = [(e.row.case.dim, e.row.case.n_q, e.row.causal) for e in ENTRIES if e.way == OURS]
    assert ours == [(d, n, c) for d in (64, 128) for n in (4096, 16384) for c in (False, True)]
    standard = [(e.row.case.dim, e.row.case.n_q, e.row.causal) for e in ENTRIES if e.way == STANDARD]
    assert standard == [(64, 4096, False), (128, 4096, False)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.way} {entry.row.name}")
def test_predictions_are_those_of_traffic(entry: Entry) -> None:
    c = entry.row.case
    heads, tensor = c.batch * c.heads, c.n_q * c.dim
    found = entry.predicted("cpu")
    if entry.way == STANDARD:
        assert sum(found.values()) == heads * 2 * traffic.standard_elements(c.n_q, c.dim)
        assert found["memory_written"] == heads * 2 * (2 * c.n_q**2 + tensor)
        return
    assert found["memory_written"] == found["cache_written"] == heads * (2 * tensor + 4 * c.n_q)
    assert found["memory_read"] == heads * 2 * 3 * tensor
    band = Band(right=0) if entry.row.causal else Band()
    visited = traffic.keys_visited(band, c.n_q, c.n_q, *entry.row.case.plan("cpu").tile)
    assert found["cache_read"] == heads * 2 * (tensor + 2 * c.dim * visited)


def small(entry: Entry) -> Entry:
    case = replace(entry.row.case, n_q=16, n_k=16, batch=1, heads=2, kv_heads=2)
    return replace(entry, row=replace(entry.row, case=case))


@pytest.fixture
def cuda_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A fake torch.cuda that records starts, marks and stops."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("mark"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: log.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: log.append("stop"))
    return log


def test_every_call_follows_a_mark(cuda_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Entry.call

    def call(self: Entry, given: Any) -> Callable[[], Any]:
        run = plain(self, given)
        if self.row.causal:
            raise torch.OutOfMemoryError("too much\nof it")
        return lambda: (cuda_log.append(self.way), run())[1]

    monkeypatch.setattr(Entry, "call", call)
    entries = [small(entry) for entry in ENTRIES[:3]]
    assert [entry.way for entry in entries] == [OURS, STANDARD, OURS]
    with one_thread():
        failed = io.run_profiled(entries, "cpu")
    assert cuda_log == [OURS, STANDARD, "start", "mark", OURS, "mark", STANDARD, "stop"]
    assert failed == {f"{OURS}: {entries[2].row.name}": "too much"}


def test_both_ways_compute_scores_of_the_same_keys() -> None:
    """Up to the scale, which standard attention leaves out: another kernel would move more bytes."""
    ours, standard = (small(entry) for entry in ENTRIES[:2])
    given = io.tensors(ours.row, "cpu", 0)
    root = given.q.shape[-1] ** 0.5
    with one_thread():
        a, b = ours.call(given._replace(q=given.q * root))(), standard.call(given)()
    assert a.shape == b.shape and float((a.float() - b.float()).norm() / b.float().norm()) < 0.02


def profiled_as_predicted(factor: float, failed: dict[str, str] | None = None, skip: int = 0) -> Any:
    """A fake profiler that counts `factor` times the prediction, in two kernels per call."""

    def profile(program: str, module: str, metrics: Any) -> tuple[list[Kernel], str]:
        assert (program, module) == ("an ncu", "flashtile.lab.bench.gpu.io")
        kernels = []
        for entry in ENTRIES[skip:]:
            counts = dict.fromkeys(METRICS, 1.0) | entry.predicted("cpu")
            half = {METRICS[key]: factor * count / 2 for key, count in counts.items()}
            kernels += [Kernel(SPIN, dict(half)), Kernel("a", dict(half)), Kernel("b", dict(half))]
        return kernels, f"something else\n{json.dumps(failed or {})}\n"

    return profile


def test_the_record_of_a_run_can_be_shown(tmp_path: Path) -> None:
    record = json.loads(json.dumps(io.run(FakeDevice(cache=50 << 20), "an ncu", profiled_as_predicted(1.25))))
    assert record["suite"] == "io" and len(record["measurements"]) == len(ENTRIES)
    for row in record["measurements"]:
        assert set(row["measured"]) == set(METRICS) and row["kernels"] == ["a", "b"]
        assert set(row["ratios"]) == set(row["predicted"])
        assert all(ratio == pytest.approx(1.25) for ratio in row["ratios"].values())
    text = render(record)
    assert "fake, L2 50 MiB" in text and "MiB, counted by ncu" in text
    least, ratio = (3 * 64 + 64 + 1), "1.25"  # Q, K and V, and the output, of 64 MiB each, and the lse
    assert "| B4 H16 N4096 D128 full | flashtile |" in text and f"| {1.25 * least:.0f} | {least} | {ratio} |" in text
    assert "| B4 H16 N4096 D128 full | standard |  |" in text
    assert {row.count("|") for row in text.split("\n\n")[1].splitlines()} == {10}
    assert "| memory read | 240 | 192 | 1.250 |" in details(record) and "| what | MiB |" in details(record)
    path, document = tmp_path / "io.json", tmp_path / "README.md"
    records.write(record, path)
    document.write_text("<!-- bench:  -->\n<!-- end of bench -->\n")
    put_into(document, path)
    assert text in document.read_text()


def test_metrics_that_a_chip_lacks_are_left_out() -> None:
    profile = profiled_as_predicted(1.0)

    def without(*arguments: Any) -> tuple[list[Kernel], str]:
        kernels, said = profile(*arguments)
        for kernel in kernels:
            kernel.counts.pop(METRICS["cache_read"])
        return kernels, said

    record = io.run(FakeDevice(), "an ncu", without)
    assert all("cache_read" not in row["measured"] for row in record["measurements"])
    assert render(record) and details(record)


def test_failed_entries_are_reported_and_the_others_keep_their_names() -> None:
    first = ENTRIES[0]
    name = f"{first.way}: {first.row.name}"
    record = io.run(FakeDevice(), "an ncu", profiled_as_predicted(1.0, {name: "too much"}, skip=1))
    assert record["failed"] == {name: "too much"} and f"Not measured: {name} (too much)." in render(record)
    assert record["measurements"][0]["way"] == STANDARD
    with pytest.raises(ProfilerError, match="it profiled 9 calls, expected 10"):
        io.run(FakeDevice(), "an ncu", profiled_as_predicted(1.0, skip=1))
