"""The output of the commands in a real terminal of 80 columns, with NO_COLOR, and through a pipe."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("typer")

from flashtile.lab.cli.app import app
from tests.support.terminal import CODES, COLOUR, COLUMNS, CONTROL, in_terminal
from tests.tools.tree import ROOT

COMMANDS = [
    ["--help"],
    ["doctor"],
    ["doctor", "--brief"],
    ["explain", "--help"],
    ["explain", "--q", "1,8,4096,64", "--causal"],
    ["explain", "--q", "1,8,4096,64", "--gpu", "none", "--backend", "tiles"],
    ["explain", "--model", "llama-3-8b", "--context", "128k", "--gpu", "h200"],
    ["explain", "--model", "gemma-3-27b", "--context", "1m", "--gpu", "l4"],
    ["explain", "--model", "llama-3-405b", "--context", "10m", "--decode", "--gpu", "mi300x"],
    ["explain", "--model", "deepseek-v3", "--decode", "--gpu", "b200"],
    ["bench", "table", str(ROOT / "benchmarks" / "records" / "cpu.json")],
    *([["lesson"]] if any(command.name == "lesson" for command in app.registered_commands) else []),
]
# All in one process, since it is importing that takes the time: in colour, without, and then with stdout a file.
CODE = """
import functools, json, os, sys
from flashtile.lab.bench import rates
from flashtile.lab.cli.app import app
commands, path, mark = json.loads(sys.argv[1])
rates.this_machine = functools.partial(rates.this_machine, seconds=0.01)
for way in ("colour", "plain", "piped"):
    if way == "plain":
        os.environ["NO_COLOR"] = "1"
    if way == "piped":
        del os.environ["NO_COLOR"]
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
    for command in commands:
        app(command, standalone_mode=False)
        print(mark, flush=True)
"""
MARK = "===="


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The output of each command: {way: [text, ...]}."""
    path = tmp_path_factory.mktemp("piped") / "out"
    terminal = in_terminal([sys.executable, "-c", CODE, json.dumps([COMMANDS, str(path), MARK])])
    parts = terminal.split(f"{MARK}\n")[: 2 * len(COMMANDS)]
    piped = path.read_text(encoding="utf-8").split(f"{MARK}\n")[: len(COMMANDS)]
    return {"colour": parts[: len(COMMANDS)], "plain": parts[len(COMMANDS) :], "piped": piped}


each = pytest.mark.parametrize("n", range(len(COMMANDS)), ids=[" ".join(words[:4]) for words in COMMANDS])


@each
@pytest.mark.parametrize("way", ["colour", "plain"])
def test_no_line_is_longer_than_the_terminal(shown, n, way):
    lines = CODES.sub("", shown[way][n]).splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= COLUMNS, max(lines, key=len)


@each
def test_no_color_is_honoured(shown, n):
    assert COLOUR.search(shown["plain"][n]) is None


@each
def test_a_pipe_gets_no_control_codes(shown, n):
    assert CONTROL.search(shown["piped"][n]) is None


def test_the_terminal_is_detected(shown):
    """Otherwise the tests above could not fail."""
    assert any(COLOUR.search(text) for text in shown["colour"])
    assert all(len(texts) == len(COMMANDS) for texts in shown.values())
