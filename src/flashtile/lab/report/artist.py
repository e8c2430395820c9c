"""Artist: draws figures in a separate process while this one computes, and pauses while this one measures time."""

import os
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from types import TracebackType
from typing import Any

from flashtile.lab.report.figures import Drawing, draw
from flashtile.lab.studies import STUDIES


class Artist:
    """Figures by the name of their study, in the order of requests; PNGs take longer."""

    def __init__(self, png: bool = True) -> None:
        self.png = png
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.pool.submit(_prepare)
        self.requests: dict[str, Future[Drawing | None]] = {}

    def __enter__(self) -> "Artist":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.pool.shutdown(cancel_futures=True)

    def draw(self, study: str, record: Any) -> None:
        self.requests[study] = self.pool.submit(_draw, study, record, self.png)

    def wait(self) -> None:
        """Wait until all requests are done."""
        wait(self.requests.values())

    def drawings(self) -> dict[str, Drawing]:
        """The drawings, without studies that had nothing to draw."""
        found = {study: drawing.result() for study, drawing in self.requests.items()}
        return {study: drawing for study, drawing in found.items() if drawing is not None}


def _prepare() -> None:
    """Lower the priority, and import matplotlib ahead of the first drawing."""
    import matplotlib.figure  # noqa: F401

    if hasattr(os, "nice"):
        os.nice(10)


def _draw(name: str, record: Any, png: bool) -> Drawing | None:
    study = next(study for study in STUDIES if study.name == name)
    return draw(name, partial(study.draw, record), png)
