"""Every lesson runs and holds, its text fits a terminal, and its record is plain."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from flashtile.lab.lessons import LESSONS, lesson
from flashtile.lab.lessons.lesson import Lesson, Unavailable

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
def test_its_source_can_be_read(one: Lesson) -> None:
    text = lesson.source(one)
    assert "def run(say: Say, quick: bool = False)" in text
    assert all(path.read_text() in text for path in one.files)
    assert one.kernel is None or re.search(r"@triton.jit|__global__", text)
    assert len(one.summary) <= 100 and one.summary.endswith(".")


def test_names_are_unique() -> None:
    assert len(set(ids)) == len(ids) == 8


def test_an_answer_has_text_and_record() -> None:
    found = lesson.answer(ONLINE, quick=True)
    assert found["text"].startswith("One token, four tiles") and found["record"]["holds"] is True


def test_an_answer_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: Any) -> dict[str, Any]:
        raise Unavailable("the moon is wrong")

    monkeypatch.setattr(lesson, "run", unavailable)
    assert lesson.answer(ONLINE) == {"lesson": ONLINE.name, "unavailable": "the moon is wrong"}


def test_without_triton_a_lesson_says_so() -> None:
    """In a process where its requirements cannot be imported."""
    code = """if True:
        import sys
        sys.modules["triton"] = None
        from flashtile.lab.lessons import LESSONS
        from flashtile.lab.lessons.lesson import answer
        print(next(answer(x)["unavailable"] for x in LESSONS if x.name == "fused-attention"))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "triton is not installed; run: pip install 'flashtile[gpu]'", done.stderr
