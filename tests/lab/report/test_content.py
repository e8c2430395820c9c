"""content.py and artist.py: everything is computed in order, the artist waits while time is measured."""

import json
from dataclasses import replace

import pytest

from flashtile.lab import lessons, studies
from flashtile.lab.lessons.lesson import Lesson
from flashtile.lab.report import content
from flashtile.lab.report.artist import Artist
from flashtile.lab.report.content import LessonResult, Result
from flashtile.lab.studies import targets
from flashtile.lab.studies.study import Study, Table


def study(name, record=0, **more):
    return Study(
        name, f"About {name}", "Why?", lambda quick: record, lambda r: None, lambda r: [], lambda r: [], **more
    )


class RecordingArtist:
    """An artist that records its calls."""

    def __init__(self, log):
        self.log = log

    def draw(self, name, record):
        self.log.append(f"draw {name}")

    def wait(self):
        self.log.append("wait")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(studies, "STUDIES", (study("one"), study("two"), study("three", timed=True)))
    monkeypatch.setattr(lessons, "LESSONS", (Lesson("four", "Four", ""),))
    monkeypatch.setattr(content, "run_lesson", lambda lesson: LessonResult(lesson, "text", {"holds": False}, None))


def test_the_artist_waits_while_time_is_measured(small):
    log = []
    found = content.collect(True, lambda what, done, total: log.append(f"{what} {done}/{total}"), RecordingArtist(log))
    assert log == [
        *("About one 0/5", "draw one", "About two 1/5", "draw two"),
        *("wait", "About three 2/5", "lesson: Four 3/5", "draw three", "the viewer 4/5"),
    ]
    assert [r.study.name for r in found.results] == ["one", "two", "three"]
    assert found.broken == ["four"]


def test_it_also_runs_without_an_artist(small):
    records = content.collect(True).records()
    assert json.loads(json.dumps(records))["about"]["quick"] is True
    assert list(records) == ["about", "one", "two", "three", "lessons"]
    assert records["lessons"]["four"] == {"record": {"holds": False}, "text": "text", "unavailable": None}


def test_failing_checks_are_named(demo_run):
    found = demo_run.content
    assert found.broken == []

    class Broken:
        holds = False

    assert replace(found, results=(Result(study("bad"), Broken()),)).broken == ["bad"]


def test_names_are_unique_and_make_good_file_names(demo_run):
    names = [result.study.name for result in demo_run.content.results]
    assert len(set(names)) == len(names) and all(name.isidentifier() for name in names)


def test_a_lesson_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(content, "answer", lambda lesson, quick: {"lesson": "x", "unavailable": "no moon"})
    assert content.run_lesson(Lesson("x", "X", "")) == LessonResult(Lesson("x", "X", ""), "", {}, "no moon")


def test_the_artist_draws_what_the_study_draws(demo_run):
    result = next(r for r in demo_run.content.results if r.study.name == "overlap")
    with Artist(png=False) as artist:
        artist.draw("overlap", result.record)
        artist.draw("targets", targets.Record("k", (), "no triton"))
        artist.wait()
        drawing = artist.drawings()["overlap"]
    assert drawing.png is None and list(artist.drawings()) == ["overlap"]
    assert drawing.svg == (demo_run.folder / "figures" / "overlap.svg").read_text(encoding="utf-8")
    assert all(isinstance(table, Table) for table in result.tables)
