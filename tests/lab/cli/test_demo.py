"""flashtile demo: findings, tables on request, next commands, JSON, exit codes, 80 columns, pipes."""

import json
import os
import re
import shlex
import subprocess
import webbrowser
from dataclasses import replace

import pytest

pytest.importorskip("typer")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from rich.console import Console
from typer.testing import CliRunner

from flashtile.host import machine
from flashtile.lab.cli import output
from flashtile.lab.cli.app import app
from flashtile.lab.report import content as report_content
from flashtile.lab.report.content import Result
from tests.lab.report.test_content import study
from tests.support.demo_run import demo_run as demo_run
from tests.support.terminal import CODES, COLOUR, COLUMNS, CONTROL, in_terminal


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def kept(demo_run, monkeypatch):
    """Replace the computation by the kept content."""
    found = demo_run.content
    monkeypatch.setattr(report_content, "collect", lambda *given: found)
    return found


def in_words(text):
    return " ".join(re.sub("[┃│]", " ", CODES.sub("", text)).split())


def test_it_prints_every_finding_and_the_path(demo_run):
    words = in_words(demo_run.terminal)
    for result in demo_run.content.results:
        assert result.study.title in words
        assert all(" ".join(sentence.split()) in words for sentence in result.findings)
    assert f"page: {demo_run.page}" in words
    assert "━" not in demo_run.terminal.rpartition("\x1b[2K")[2], "a table, which nobody asked for"
    assert len(demo_run.terminal.rpartition("\x1b[2K")[2].splitlines()) < 200


def test_it_prints_every_table_on_request(kept):
    words = in_words(run("--no-page", "--tables").stdout)
    for result in kept.results:
        assert all(" ".join(table.rows[0][0].split()[:1]) in words for table in result.tables if table.rows)
    assert all(told.lesson.title in words for told in kept.lessons)


def test_no_number_is_shortened(kept):
    """At 80 columns, no word with a digit in any cell is truncated."""
    console = Console(width=COLUMNS)
    for result in kept.results:
        for table in result.tables:
            with console.capture() as shown:
                console.print(output.table(*table))
            words = set(in_words(shown.get()).split())
            missing = [word for row in table.rows for cell in row for word in cell.split() if word not in words]
            assert not missing and not any("…" in word for word in words), (table.title, missing)


def test_the_last_lines_say_what_to_do_next(kept, monkeypatch, tmp_path):
    monkeypatch.setattr(output, "command", lambda: "bin/flashtile")
    monkeypatch.setattr(
        "flashtile.lab.report.folder.write", lambda content, drawings, out: out.absolute() / "index.html"
    )
    *_, page, lesson, explain, tables = run("--out", str(tmp_path / "x")).stdout.splitlines()
    assert page == f"page: {tmp_path / 'x' / 'index.html'}"
    assert lesson == "next: bin/flashtile lesson online-softmax" and tables == "next: bin/flashtile demo --tables"
    for line in (lesson, explain, tables):  # and these are commands
        command, *arguments = shlex.split(line.removeprefix("next: bin/flashtile "))
        assert CliRunner().invoke(app, [command, *arguments, "--help"]).exit_code == 0
    assert "demo --tables" not in run("--no-page", "--tables").stdout


def test_a_short_run_is_short(demo_run):
    """Under 10 s on an idle machine; here other tests run too."""
    assert demo_run.seconds < 90


def test_no_line_is_longer_than_the_terminal(demo_run):
    lines = re.split(r"[\r\n]", CODES.sub("", demo_run.terminal))
    assert max(map(len, (line for line in lines if not line.startswith(("page: ", "next: "))))) <= COLUMNS


def test_progress_is_shown_and_erased(demo_run):
    assert "lesson: " in demo_run.terminal and re.search(r"\d+/\d+", demo_run.terminal)
    assert demo_run.terminal.rstrip().endswith("demo --tables")


@pytest.fixture(scope="module")
def plain(demo_run):
    return in_terminal(demo_run.replay("--no-page"), NO_COLOR="1")


def test_no_color_is_honoured(plain, demo_run):
    assert COLOUR.search(demo_run.terminal) and not COLOUR.search(plain)


def test_long_names_do_not_break_the_bar(plain):
    assert "something with a very long name" in plain
    assert max(map(len, re.split(r"[\r\n]", CODES.sub("", plain)))) <= COLUMNS


def test_a_pipe_gets_no_control_codes_and_a_page_is_written(demo_run, tmp_path):
    done = subprocess.run(demo_run.replay("--out", "out"), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert CONTROL.search(done.stdout) is None and CONTROL.search(done.stderr) is None
    assert f"page: {tmp_path / 'out' / 'index.html'}" in done.stdout.splitlines()
    assert (tmp_path / "out" / "index.html").stat().st_size > 100_000
    assert os.listdir(tmp_path) == ["out"]


def test_json_prints_nothing_else(kept, demo_run):
    printed = json.loads(run("--json", "--no-page").stdout)
    assert printed == json.loads(json.dumps(kept.records()))
    for name, value in printed.items():
        assert json.loads((demo_run.folder / "records" / f"{name}.json").read_text()) == value


def test_open(kept, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(
        "flashtile.lab.report.folder.write", lambda content, drawings, out: out.absolute() / "index.html"
    )
    run("--open", "--out", str(tmp_path / "x"))
    assert opened == [(tmp_path / "x" / "index.html").as_uri()]


def test_what_does_not_hold_is_exit_code_1(kept, monkeypatch):
    class Broken:
        holds = False

    broken = replace(kept, results=(*kept.results, Result(study("moon"), Broken())))
    monkeypatch.setattr(report_content, "collect", lambda *given: broken)
    monkeypatch.setattr("flashtile.lab.report.content.to_dict", lambda record: None)
    assert "does not hold: moon" in run("--json", "--no-page", code=1).stderr


def test_wrong_usage_is_exit_code_2(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "expected a new or empty folder" in run("--out", str(tmp_path), code=2).stderr
    inside = tmp_path / "thesis.tex" / "demo"
    assert f"--out: cannot write {inside}: Not a directory" in run("--out", str(inside), code=2).stderr
    assert "--open: " in run("--no-page", "--open", code=2).stderr
    assert "--tables: " in run("--json", "--tables", code=2).stderr


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(machine, "has", lambda package: package != "matplotlib")
    assert "pip install 'flashtile[report]'" in run(code=3).stderr
