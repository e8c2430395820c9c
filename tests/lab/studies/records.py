"""The record of each study, computed once for all tests of a process."""

from __future__ import annotations

from functools import cache
from typing import Any

from flashtile.lab.studies import STUDIES, Study

ALL = {study.name: study for study in STUDIES if study.numbered or study.name == "arithmetic"}


def record(name: str, quick: bool = True) -> Any:
    return _computed(name, quick)


@cache
def _computed(name: str, quick: bool) -> Any:
    return ALL[name].compute(quick)


def told(name: str, quick: bool = True) -> str:
    """All tables and sentences of a study as one text."""
    study: Study[Any] = ALL[name]
    cells = [cell for table in study.tables(record(name, quick)) for row in table.rows for cell in row]
    return "\n".join([*cells, *study.findings(record(name, quick))])
