"""Markdown tables: rows of text, and the format of numbers."""

import re
from collections.abc import Sequence
from typing import Any

_MARKUP = re.compile(r"[\\`<>|\[\]]")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table; the first row is the head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def plain(x: Any) -> Any:
    """Escape text from a file, so that it can neither end a cell or a place nor be markup."""
    if isinstance(x, str):
        return _MARKUP.sub(lambda found: f"\\{found[0]}", " ".join(x.split()))
    if isinstance(x, dict):
        return {plain(name): plain(value) for name, value in x.items()}
    return [plain(value) for value in x] if isinstance(x, list) else x


def software(machine: dict[str, Any], *names: str) -> str:
    """The versions of these packages, and the commit, as far as they are known."""
    versions = [f"{name} {machine['versions'][name]}" for name in names if machine["versions"][name]]
    return ", ".join([*versions, f"commit {machine['commit'][:12]}"] if machine["commit"] else versions)


def number(x: float | None, digits: int = 2) -> str:
    return "" if x is None else f"{x:.{digits}f}"


def milliseconds(timing: dict[str, Any] | None) -> str:
    return "" if timing is None else f"{timing['median_s'] * 1e3:.3g}"
