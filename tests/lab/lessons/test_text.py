"""Tables and paragraphs of a lesson."""

from __future__ import annotations

from flashtile.lab.bench.timing import Timing
from flashtile.lab.lessons import text
from flashtile.lab.lessons.text import Say


def test_paragraphs_are_wrapped_and_end_with_an_empty_line() -> None:
    lines: list[str] = []
    Say(lines.append).paragraph("word " * 30, "last.")
    assert max(map(len, lines)) <= text.COLUMNS and len(lines) == 3
    assert " ".join(lines).split() == ["word"] * 30 + ["last."] and lines[-1] == ""


def test_tables_line_up() -> None:
    lines: list[str] = []
    Say(lines.append).table(("name", "n"), [("a", "10"), ("long name", "7")])
    assert lines == ["name        n", "---------  --", "a          10", "long name   7", ""]


def test_timings_are_shown_and_returned() -> None:
    lines: list[str] = []
    record = Say(lines.append).timings("what", {"one": Timing((0.001, 0.002, 0.003))})
    assert record["one"]["median_s"] == 0.002 and "2 ms" in lines[2] and "1.5 ms to 2.5 ms" in lines[2]
