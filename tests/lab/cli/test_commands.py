"""The command line: valid JSON, exit codes, and a helpful message if an extra is missing."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from flashtile import __version__, dispatch
from flashtile.host import threads
from flashtile.lab import cli
from flashtile.lab.bench import cases, records, suite
from flashtile.lab.cli import output
from flashtile.lab.cli.app import app


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_version():
    assert run("--version").stdout.strip() == __version__


COMMANDS = [command.name for command in (*app.registered_commands, *app.registered_groups)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    assert "Usage" in run(command, "--help").stdout


@pytest.mark.parametrize("group", [(), ("bench",)])
def test_no_command_summary_is_truncated(group):
    listed = run(*group, "--help").stdout.partition("Commands:\n")[2].splitlines()
    assert len(listed) >= 5 and all(line.endswith(".") and not line.endswith("...") for line in listed), listed


def test_the_package_names_every_command_and_exit_code():
    assert set(COMMANDS) == {"demo", "lesson", "explain", "doctor", "bench"}
    first, _, codes = cli.__doc__.partition("\n")
    assert set(COMMANDS) <= set(re.findall(r"\w+", first))
    assert [int(code) for code in re.findall(r"\b\d\b", codes)] == [0, cli.DOES_NOT_HOLD, 2, cli.MISSING]
    assert "a required package or GPU is missing" in " ".join(codes.split())
    assert "exit code" not in output.__doc__ and not hasattr(output, "DOES_NOT_HOLD")


def test_doctor_prints_the_dispatch_table():
    found = json.loads(run("doctor", "--json").stdout)
    assert [row["backend"] for row in found["backends"]] == [row.name for row in dispatch.TABLE]
    assert found["versions"]["flashtile"] == __version__ and found["devices"][0]["device"] == "cpu"
    text = run("doctor").stdout
    assert all(row.name in text for row in dispatch.TABLE)
    assert len(run("doctor", "--brief").stdout.splitlines()) == len(dispatch.TABLE)


def test_doctor_names_an_ignored_setting(monkeypatch):
    monkeypatch.setenv("FLASHTILE_THREADS", "abc")
    threads.from_environment.cache_clear()
    try:
        assert "FLASHTILE_THREADS=abc (ignored: expected a number above 0)" in run("doctor").stdout.replace("\n", " ")
    finally:
        threads.from_environment.cache_clear()


def test_doctor_gives_every_reason(monkeypatch):
    monkeypatch.setattr(
        dispatch.Backend, "missing", lambda self: "the moon is wrong" if self.name == "native" else None
    )
    assert "no: the moon is wrong" in run("doctor").stdout
    assert "native: the moon is wrong" in run("doctor", "--brief", "--strict", code=1).stdout


def test_bench_writes_a_record_and_a_table(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "CPU", (cases.Group("full", "forward", (cases.square(16, 8),), bar=1e9),))
    path = tmp_path / "r.json"
    result = run("bench", "cpu", "--only", "full", "--quick", "--threads", "1", "--output", str(path), "--check")
    assert "| forward |" in result.stdout and records.read(path)["quick"] is True
    assert "| forward |" in run("bench", "table", str(path)).stdout
    assert "| full |" in run("bench", "table", str(path), "--details").stdout
    assert json.loads(run("bench", "table", str(path), "--json").stdout)[0]["group"] == "full"
    printed = json.loads(run("bench", "cpu", "--only", "full", "--quick", "--output", str(path), "--json").stdout)
    assert printed == records.read(path) and printed["suite"] == "cpu"
    run("bench", "table", str(tmp_path / "none.json"), code=2)
    run("bench", "cpu", "--only", "abacus", code=2)


def test_bench_names_a_record_by_suite_and_time(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "run", lambda **_: records.new("cpu", True, threads=1))
    assert json.loads(run("bench", "cpu", "--json").stdout)["suite"] == "cpu"
    (path,) = (tmp_path / records.FOLDER).iterdir()
    assert re.fullmatch(r"cpu-\d{8}T\d{6}\.json", path.name) and records.read(path)["threads"] == 1


def test_bench_check_fails_if_a_bar_does(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.setattr(suite, "CPU", (cases.Group("full", "forward", (cases.square(16, 8),), bar=1e-9),))
    run("bench", "cpu", "--only", "full", "--quick", "--output", str(tmp_path / "r.json"), "--check", code=1)


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from flashtile.lab.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3 and "pip install 'flashtile[cli]'" in done.stderr
