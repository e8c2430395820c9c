"""Artist: draws in a process of its own while this one computes, and rests while this one measures time."""

from __future__ import annotations

import os
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from types import TracebackType
from typing import Any

from flashtile.lab.report.figures import Drawing, draw
from flashtile.lab.studies import STUDIES


class Artist:
    """Figures by the name of their study, in the order in which they were asked for; with PNG they take longer."""

    def __init__(self, png: bool = True) -> None:
        self.png = png
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.pool.submit(_begin)
        self.asked: dict[str, Future[Drawing | None]] = {}

    def __enter__(self) -> Artist:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.pool.shutdown(cancel_futures=True)

    def draw(self, study: str, record: Any) -> None:
        self.asked[study] = self.pool.submit(_drawn, study, record, self.png)

    def rest(self) -> None:
        """Return when all that was asked for is done, and nothing is under way."""
        wait(self.asked.values())

    def drawings(self) -> dict[str, Drawing]:
        """Without those whose record had nothing to draw."""
        found = {study: drawing.result() for study, drawing in self.asked.items()}
        return {study: drawing for study, drawing in found.items() if drawing is not None}


def _begin() -> None:
    """Give way to the one who computes; and import what takes a while before there is anything to draw."""
    import matplotlib.figure  # noqa: F401

    if hasattr(os, "nice"):
        os.nice(10)


def _drawn(name: str, record: Any, png: bool) -> Drawing | None:
    study = next(study for study in STUDIES if study.name == name)
    return draw(name, partial(study.draw, record), png)
