"""Records: one JSON file per run of a suite, with every measurement, the machine, and the bars."""

import json
import os
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashtile.host import machine

SCHEMA = 1
FOLDER = Path("benchmarks/records")

Record = dict[str, Any]

FIELDS = {"suite": str, "machine": dict, "absent": dict, "measurements": list, "summary": list}  # of every record
FOUND = {"created", "absent", "measurements", "summary", "failed", "unfit", "left_out"}  # results of a run


def new(suite: str, quick: bool, **more: Any) -> Record:
    """Create an empty record. `more`: further conditions of the measurements."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine.describe(),
        **more,
        "absent": {},  # peers that could not be timed, and why
        "measurements": [],
        "summary": [],
    }


def goal(
    group: str, title: str, measure: str, bar: float | None = None, *, worst_bar: float | None = None, **more: Any
) -> dict[str, Any]:
    """A line of a summary, not measured yet: the bars on the mean and on the worst value, and whether they hold."""
    line = {"group": group, "title": title, "measure": measure, **more, "bar": bar, "reach": None}
    return line | {"worst_bar": worst_bar, "value": None, "worst": None, "holds": None}


def write(record: Record, path: Path) -> None:
    """Write atomically: readers never see half a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path) -> Record:
    """Read a record, or raise a ValueError that names the file."""
    try:
        record: Record = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a record in JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: expected a record, got a JSON {type(record).__name__}")
    if record.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected a record of schema {SCHEMA}, got {record.get('schema')}")
    check_fields(record, FIELDS, path)
    return record


def check_fields(record: Record, fields: Mapping[str, type], path: Path) -> None:
    """Raise a ValueError that names the file unless its record has these fields, of these types."""
    for name, kind in fields.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"{path}: expected a record with {name!r} in it, a {kind.__name__}")


def check_alike(record: Record, other: Record) -> None:
    """Raise a ValueError unless both were measured in the same way, by the same code, on the same machine."""
    for name, value in json.loads(json.dumps(record)).items():
        if name not in FOUND and value != (before := other.get(name)):
            if isinstance(value, dict) and isinstance(before, dict):  # name the part that differs
                part = next(key for key in value | before if value.get(key) != before.get(key))
                name, value, before = f"{name}, {part}", value.get(part), before.get(part)
            raise ValueError(f"{name} differs: {before} in the other record, {value} here")


def default_path(suite: str) -> Path:
    """A path named by suite and time."""
    return FOLDER / f"{suite}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}.json"
