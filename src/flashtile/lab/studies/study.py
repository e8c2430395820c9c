"""Study: a question, the computation that answers it, and the tables, figure and sentences of its record."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from flashtile.lab.studies import canvas
from flashtile.numerics.dtypes import Array

SEED = 42
R = TypeVar("R")


class Table(NamedTuple):
    """Text for a terminal or a page; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Study(Generic[R]):
    """A question and its answer. Everything shown is a pure function of the record that compute() returns."""

    name: str
    title: str
    question: str
    compute: Callable[..., R]  # (quick: bool = False)
    draw: Callable[[R], canvas.Figure | None]  # None if there is nothing to draw
    tables: Callable[[R], list[Table]]
    findings: Callable[[R], list[str]]
    numbered: bool = False  # shown in the page's section of studies; the others belong to other sections
    timed: bool = False  # measures time, so nothing else may run beside it


class Module(Protocol[R]):
    """What the module of a study has."""

    __name__: str
    TITLE: str
    QUESTION: str

    def compute(self, quick: bool = False) -> R: ...

    def draw(self, record: R, /) -> canvas.Figure | None: ...

    def tables(self, record: R, /) -> list[Table]: ...

    def findings(self, record: R, /) -> list[str]: ...


def study(module: Module[R], **more: bool) -> Study[R]:
    """The study in a module, with the module's name."""
    name, (title, question) = module.__name__.rpartition(".")[2], (module.TITLE, module.QUESTION)
    return Study(name, title, question, module.compute, module.draw, module.tables, module.findings, **more)


def to_dict(record: Any) -> Any:
    """Convert a record to plain values for JSON; non-finite numbers become "inf", "-inf" or "nan"."""
    if is_dataclass(record) and not isinstance(record, type):
        return {field.name: to_dict(getattr(record, field.name)) for field in fields(record)}
    if isinstance(record, dict):
        return {str(key): to_dict(value) for key, value in record.items()}
    if isinstance(record, (tuple, list)):
        return [to_dict(value) for value in record]
    if isinstance(record, float) and not np.isfinite(record):
        return str(record)
    if record is None or isinstance(record, (bool, int, float, str)):
        return record
    raise TypeError(f"record: expected plain values in dataclasses, tuples and dicts, got {type(record).__name__}")


def samples(*shapes: tuple[int, ...], dtype: Any = np.float64) -> tuple[Array, ...]:
    """Standard normal arrays, always the same."""
    rng = np.random.default_rng(SEED)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def qkv(n: int, d: int, dtype: Any = np.float64) -> tuple[Array, Array, Array]:
    """Queries, keys and values of one head."""
    q, k, v = samples((n, d), (n, d), (n, d), dtype=dtype)
    return q, k, v
