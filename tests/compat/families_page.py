"""Results for transformers' model families: the record, and the tables of docs/transformers.md."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
RECORD, PAGE = DOCS / "transformers.json", DOCS / "transformers.md"
MARKED = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end of families -->)", re.DOTALL)

EQUAL, DIFFERS, REFUSED, NEVER, UNBUILT = OUTCOMES = (
    "equal",
    "differs",
    "refused",
    "never calls it",
    "cannot be built here",
)
# The outcome of a family is the first of these that one of its types has.
WORST_FIRST = (DIFFERS, REFUSED, EQUAL, NEVER, UNBUILT)

Types = dict[str, dict[str, Any]]


def write(types: Types) -> None:
    import torch
    import transformers

    from tests.compat import tiny

    rows = []
    for family, kinds in tiny.types().items():
        for kind in kinds:
            x = types[kind]
            why = textwrap.shorten(x["why"], 130, placeholder=" ...")
            rows.append([kind, family, x["model"], x["outcome"], why, x["checks"], x["warned"]])
    head = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    RECORD.write_text(json.dumps(head)[:-1] + f', "types": [\n{lines}\n]}}\n')
    PAGE.write_text(MARKED.sub(lambda _: tables(read()), PAGE.read_text()))


def read() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def tables(record: dict[str, Any]) -> str:
    families: dict[str, list[list[Any]]] = {}
    for row in record["types"]:
        families.setdefault(row[1], []).append(row)
    sorted_by = {
        family: min((row[3] for row in rows), key=WORST_FIRST.index) for family, rows in sorted(families.items())
    }
    text = f"transformers {record['transformers']}, torch {record['torch']}: {len(families)} families.\n\n"
    text += "| | families |\n|---|---|\n"
    for outcome in OUTCOMES:
        text += f"| {outcome} | {sum(x == outcome for x in sorted_by.values())} |\n"
    groups: dict[str, list[str]] = {}
    for family, outcome in sorted_by.items():
        if outcome == EQUAL:
            checks = sorted({check for row in families[family] for check in row[5]}, key=_place)
            groups.setdefault("; ".join(checks), []).append(family)
    text += "\n### Equal, in what was compared\n| compared | families |\n|---|---|\n"
    for checks, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        text += f"| {checks} | {', '.join(names)} |\n"
    for title, outcome in (("Different", DIFFERS), ("Refused, with this reason", REFUSED)):
        rows = [row for row in record["types"] if row[3] == outcome]
        if rows:
            text += f"\n### {title}\n| model type | |\n|---|---|\n"
            text += "".join(f"| {row[0]} | {_cell(row[4])} |\n" for row in rows)
    for title, warned in (
        ("Never calls it, with a warning", True),
        ("Never calls it, without a warning: most have no such attention", False),
    ):
        rows = [row for row in record["types"] if row[3] == NEVER and row[6] is warned]
        text += f"\n### {title}\n" + textwrap.fill(", ".join(row[0] for row in rows), 120) + "\n"
    text += "\n### Cannot be built here\n| family | error |\n|---|---|\n"
    for family, outcome in sorted_by.items():
        if outcome == UNBUILT:
            text += f"| {family} | {_cell(families[family][0][4])} |\n"
    return text


def _place(check: str) -> tuple[bool, bool, str]:
    return check != "prefill", "cache" in check or "packed" in check, check


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
