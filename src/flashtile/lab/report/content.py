"""Content: everything the page and the terminal show, computed in one run: studies, lessons and scenes."""

from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count
from typing import Any

from flashtile import dispatch
from flashtile.host import machine
from flashtile.lab import lessons, studies
from flashtile.lab.bench.suite import Progress
from flashtile.lab.lessons.lesson import Lesson, answer, source
from flashtile.lab.report import viewer
from flashtile.lab.report.artist import Artist
from flashtile.lab.report.figures import Drawing
from flashtile.lab.studies.study import Study, Table, to_dict


@dataclass(frozen=True)
class Result:
    """A study and its record, from which everything else follows; the page adds a drawing, if there is one."""

    study: Study[Any]
    record: Any
    drawing: Drawing | None = None

    @property
    def tables(self) -> list[Table]:
        return self.study.tables(self.record)

    @property
    def findings(self) -> list[str]:
        return self.study.findings(self.record)

    @property
    def holds(self) -> bool:
        """Whether the measured results are within their bounds; a study without bounds holds."""
        return bool(getattr(self.record, "holds", True))


@dataclass(frozen=True)
class LessonResult:
    """A lesson with its output and record, or the reason why it could not run here."""

    lesson: Lesson
    text: str
    record: dict[str, Any]
    reason: str | None

    @property
    def source(self) -> str:
        return source(self.lesson)

    @property
    def holds(self) -> bool:
        return bool(self.record.get("holds", True))


@dataclass(frozen=True)
class Content:
    """One run of everything."""

    created: str
    quick: bool
    machine: dict[str, Any]
    devices: list[dict[str, Any]]
    backends: list[dict[str, Any]]
    results: tuple[Result, ...]
    lessons: tuple[LessonResult, ...]
    scenes: dict[str, Any]

    @property
    def broken(self) -> list[str]:
        """The names of studies and lessons that do not hold."""
        named = {r.study.name: r.holds for r in self.results} | {x.lesson.name: x.holds for x in self.lessons}
        return [name for name, holds in named.items() if not holds]

    def records(self) -> dict[str, Any]:
        """Plain values for JSON, one entry per file."""
        names = ("created", "quick", "machine", "devices", "backends", "broken")
        about = {name: getattr(self, name) for name in names}
        outputs = {
            x.lesson.name: {"record": to_dict(x.record), "text": x.text, "unavailable": x.reason} for x in self.lessons
        }
        return {"about": about, **{r.study.name: to_dict(r.record) for r in self.results}, "lessons": outputs}


def collect(
    quick: bool = False, progress: Progress = lambda what, done, total: None, artist: Artist | None = None
) -> Content:
    """Run everything in sequence. An artist draws meanwhile, but not while time is measured."""
    total, done = len(studies.STUDIES) + len(lessons.LESSONS) + 1, count()

    def compute(study: Study[Any]) -> Result:
        progress(study.title, next(done), total)
        return Result(study, study.compute(quick))

    def draw(result: Result) -> None:
        if artist is not None:
            artist.draw(result.study.name, result.record)

    results = []
    for study in (study for study in studies.STUDIES if not study.timed):
        results.append(compute(study))
        draw(results[-1])
    devices = machine.devices()
    if artist is not None:
        artist.wait()
    timed = [compute(study) for study in studies.STUDIES if study.timed]
    outputs = []
    for lesson in lessons.LESSONS:
        progress(f"lesson: {lesson.title}", next(done), total)
        outputs.append(run_lesson(lesson))
    for result in timed:
        draw(result)
    progress("the viewer", next(done), total)
    return Content(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        quick=quick,
        machine=machine.describe(),
        devices=devices,
        backends=[{"backend": row.name, "device": row.device, "why_not": row.missing()} for row in dispatch.TABLE],
        results=(*results, *timed),
        lessons=tuple(outputs),
        scenes=viewer.scenes(quick),
    )


def run_lesson(lesson: Lesson) -> LessonResult:
    """Run a lesson in its short form."""
    found = answer(lesson, quick=True)
    return LessonResult(lesson, found.get("text", ""), found.get("record", {}), found.get("unavailable"))
