"""The command line: JSON that parses, exit codes that mean something, and kind words when an extra is missing."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from flashtile import __version__, dispatch
from flashtile.bench import cases, memory, records, showcase, suite
from flashtile.cli.app import app
from flashtile.cli.models import length, models


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_version():
    assert run("--version").stdout.strip() == __version__


@pytest.mark.parametrize("command", ["demo", "doctor", "explain", "bench"])
def test_every_command_has_help(command):
    assert "Usage" in run(command, "--help").stdout


def test_doctor_prints_the_dispatch_table():
    found = json.loads(run("doctor", "--json").stdout)
    assert [row["backend"] for row in found["backends"]] == [row.name for row in dispatch.TABLE]
    assert found["versions"]["flashtile"] == __version__ and found["devices"][0]["device"] == "cpu"
    text = run("doctor").stdout
    assert all(row.name in text for row in dispatch.TABLE)
    assert len(run("doctor", "--brief").stdout.splitlines()) == len(dispatch.TABLE)


def test_doctor_gives_the_reason_for_every_no(monkeypatch):
    monkeypatch.setattr(
        dispatch.Backend, "missing", lambda self: "the moon is wrong" if self.name == "native" else None
    )
    assert "no: the moon is wrong" in run("doctor").stdout
    assert "native: the moon is wrong" in run("doctor", "--brief", "--strict", code=1).stdout


def test_explain_shapes():
    found = json.loads(run("explain", "--q", "1,8,1k,64", "--k", "1x2x1kx64", "--chip", "none", "--json").stdout)
    assert found["flops"] == 4 * 8 * 1024 * 1024 * 64 and found["floor"] is None and found["model"] is None
    assert found["kv_bytes"] == 2 * 2 * 1024 * 64 * 4


@pytest.mark.parametrize(
    ("model", "a_token", "gib_at_128k"),
    [
        ("llama-3-8b", 131_072, 16),
        ("llama-3-70b", 327_680, 40),
        ("llama-3-405b", 516_096, 63),
        ("llama-2-7b", 524_288, 64),
    ],
)
def test_explain_models(model, a_token, gib_at_128k):
    found = json.loads(run("explain", "--model", model, "--context", "128k", "--chip", "h200", "--json").stdout)
    assert found["model"]["kv_bytes_a_token"] == a_token
    assert found["model"]["kv_bytes"] == gib_at_128k << 30
    assert found["score_bytes"] == models()[model].heads * 2 * (128 << 10) ** 2
    assert found["floor"]["bound"] == "compute"
    assert found["floor"]["rates"]["flops"] / found["floor"]["rates"]["bytes"] == pytest.approx(206, abs=1)


def test_explain_decode_is_bound_by_memory():
    found = json.loads(run("explain", "--model", "llama-3-8b", "--decode", "--chip", "h200", "--json").stdout)
    assert found["q_shape"][2] == 1 and found["floor"]["bound"] == "memory"
    assert found["intensity"] == pytest.approx(4, rel=0.01)  # query heads on a key head


def test_explain_measures_this_machine():
    assert "on a machine of" in run("explain", "--q", "1,8,256,64").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--q", "1,a"),
        ("--q", "4,4", "--k", "4,5"),
        ("--q", "4,4", "--dtype", "int8"),
        ("--q", "4,4", "--chip", "abacus"),
        ("--q", "4,4", "--backend", "abacus"),
        ("--model", "abacus"),
        ("--model", "llama-3-8b", "--context", "long"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments):
    run("explain", *arguments, "--json", code=2)


def test_lengths():
    assert [length(x) for x in ("7", "8k", "8K", "1m")] == [7, 8192, 8192, 1 << 20]


def test_bench_writes_a_record_and_a_table(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "CPU", (cases.Group("full", "forward", (cases.square(16, 8),), bar=1e9),))
    path = tmp_path / "r.json"
    result = run("bench", "cpu", "--only", "full", "--quick", "--threads", "1", "--json", str(path), "--check")
    assert "| forward |" in result.stdout and records.read(path)["quick"] is True
    assert "| forward |" in run("bench", "table", str(path)).stdout
    assert "| full |" in run("bench", "table", str(path), "--details").stdout
    assert json.loads(run("bench", "table", str(path), "--json").stdout)[0]["group"] == "full"
    assert json.loads(run("bench", "cpu", "--only", "full", "--quick", "--json", "-").stdout)["suite"] == "cpu"
    run("bench", "table", str(tmp_path / "none.json"), code=2)
    run("bench", "cpu", "--only", "abacus", code=2)


def test_bench_check_fails_where_a_bar_does(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(suite, "CPU", (cases.Group("full", "forward", (cases.square(16, 8),), bar=1e-9),))
    run("bench", "cpu", "--only", "full", "--quick", "--json", "-", "--check", code=1)


def test_demo(monkeypatch):
    monkeypatch.setattr(showcase, "CONFIGURATIONS", showcase.CONFIGURATIONS[:1])
    monkeypatch.setattr(showcase, "LENGTHS", (64,))
    monkeypatch.setattr(showcase, "SPEED", (cases.square(16, 8, naive=True),) * 2)
    monkeypatch.setattr(showcase, "SECONDS", 0.01)
    monkeypatch.setattr(memory, "growth", lambda *a: None)
    assert "Same answer" in run("demo", "--threads", "1").stdout
    assert json.loads(run("demo", "--threads", "1", "--json").stdout)["holds"] is True
    monkeypatch.setattr(showcase, "run", lambda *a, **k: {"holds": False})
    run("demo", "--json", code=1)


def command(*arguments, **environment):
    import os

    code = "from flashtile.cli import main; main()"
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


def test_no_colour_where_none_is_wanted():
    done = command("doctor", NO_COLOR="1", FORCE_COLOR="1")
    assert done.returncode == 0 and "\x1b[3" not in done.stdout  # bold is not a colour


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from flashtile.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3 and "pip install 'flashtile[cli]'" in done.stderr
