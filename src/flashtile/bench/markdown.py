"""Rows of words as a markdown table, and how numbers look in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def number(x: float | None, digits: int = 2) -> str:
    return "" if x is None else f"{x:.{digits}f}"


def milliseconds(timing: dict[str, Any] | None) -> str:
    return "" if timing is None else f"{timing['median_s'] * 1e3:.3g}"
