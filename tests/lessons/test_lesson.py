"""Every lesson: it runs, what it claims holds, its text fits a terminal, and its record is plain."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from flashtile.lessons import LESSONS, lesson
from flashtile.lessons.lesson import Lesson, Unavailable

ONLINE = LESSONS[0]
ids = [x.name for x in LESSONS]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Triton's interpreter
@pytest.mark.parametrize("one", LESSONS, ids=ids)
def test_it_runs_and_holds(one: Lesson) -> None:
    lines: list[str] = []
    try:
        record = lesson.run(one, lines.append, quick=True)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert record["holds"] is True
    assert max(map(len, lines)) <= 80
    assert not re.search(r"[^ -~]", "".join(lines)), "only plain characters"
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert any(re.search(r"\d (s|ms|us)\b", line) for line in lines), "a time was measured"


@pytest.mark.parametrize("one", LESSONS, ids=ids)
def test_its_source_is_there_to_read(one: Lesson) -> None:
    text = lesson.source(one)
    assert "def run(say: Say, quick: bool = False)" in text
    assert all(path.read_text() in text for path in one.files)
    assert one.kernel is None or re.search(r"@triton.jit|__global__", text)
    assert len(one.summary) <= 100 and one.summary.endswith(".")


def test_names_are_unique() -> None:
    assert len(set(ids)) == len(ids) == 8


def test_apart_gives_text_and_record() -> None:
    text, record = lesson.run_apart(ONLINE, quick=True)
    assert text.startswith("One token, four tiles") and record["holds"] is True


def test_apart_passes_a_reason_on() -> None:
    """In a process where nothing that Triton needs can be imported."""
    code = "import sys; sys.modules['triton'] = None; from flashtile.lessons.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "fused-attention"], capture_output=True, text=True)
    assert json.loads(done.stdout)["unavailable"] == "triton is not installed"


def test_apart_raises_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, '{"lesson": "x", "unavailable": "the moon is wrong"}', "")
    monkeypatch.setattr(lesson.subprocess, "run", lambda *a, **k: done)
    with pytest.raises(Unavailable, match="the moon is wrong"):
        lesson.run_apart(ONLINE)


def test_apart_raises_a_failure() -> None:
    with pytest.raises(RuntimeError, match="no-such-lesson"):
        lesson.run_apart(Lesson("no-such-lesson", "", ""))
