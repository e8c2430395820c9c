"""A record of bytes moved, as markdown."""

from collections.abc import Iterable
from typing import Any

from flashtile.lab.bench import markdown
from flashtile.lab.bench.gpu.io import IO
from flashtile.lab.bench.gpu.peers import OURS
from flashtile.lab.bench.gpu.rows import DTYPE
from flashtile.lab.bench.records import Record

Row = dict[str, Any]
FIELDS: dict[str, type] = {"device": dict, "failed": dict}


def parts(record: Record) -> Iterable[str]:
    return caption(record), _table(record)


def brief(record: Record) -> Iterable[str]:
    return (caption(record),)


def caption(record: Record) -> str:
    d, software = record["device"], markdown.software(record["machine"], "triton")
    text = f"{d['name']}, L2 {d['cache'] / 2**20:.0f} MiB; {software}. "
    text += f"{DTYPE}; MiB, counted by ncu, each kernel with cold caches."
    return text + "".join(f" Not measured: {name} ({reason})." for name, reason in record["failed"].items())


def _table(record: Record) -> str:
    """One row per call: the traffic between memory and L2 and between L2 and processors, and the prediction."""
    shown: list[tuple[str, ...]] = [
        ("forward", "way", "tile", "from and to memory", "least", "ratio", "from and to the L2", "by tiles", "ratio")
    ]
    for row in record["measurements"]:
        tile = "x".join(map(str, row["tile"])) if row["way"] == OURS else ""
        shown.append((_name(row), row["way"], tile, *_side(row, "memory"), *_side(row, "cache")))
    return markdown.table(shown)


def details(record: Record) -> str:
    """One row per number: counted, predicted, and their ratio."""
    shown: list[tuple[str, ...]] = [("case", "way", "what", "MiB", "predicted", "ratio")]
    for row in record["measurements"]:
        for key, count in row["measured"].items():
            predicted = row["predicted"].get(key)
            ratio = markdown.number(row["ratios"].get(key), 3)
            shown.append((_name(row), row["way"], key.replace("_", " "), _mib(count), _mib(predicted), ratio))
    return markdown.table(shown)


def _side(row: Row, side: str) -> tuple[str, str, str]:
    """Reads and writes together: counted, predicted, their ratio."""
    keys = (f"{side}_read", f"{side}_written")
    counted, predicted = (
        sum(row[source][key] for key in keys) if all(key in row[source] for key in keys) else None
        for source in ("measured", "predicted")
    )
    ratio = counted / predicted if counted is not None and predicted else None
    return _mib(counted), _mib(predicted), markdown.number(ratio)


def _mib(count: float | None) -> str:
    return "" if count is None else f"{count / 2**20:.0f}"


def _name(row: Row) -> str:
    return " ".join(word for word in row["case"].split() if word not in (IO, "forward", DTYPE))
