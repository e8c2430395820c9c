"""A tuning record as text: rows for backends/triton/tuning.py, the best tiles, and every candidate."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from flashtile.backends.gpu.config import Config
from flashtile.backends.triton.tuning import KERNELS
from flashtile.lab.bench import markdown
from flashtile.lab.bench.candidates import DTYPES, ITEMSIZE
from flashtile.lab.bench.records import Record

FIELDS: dict[str, type] = {"rounds": int, "device": dict, "fields": list, "left_out": list}


def parts(record: Record) -> Iterable[str]:
    return caption(record), _table(record)


def brief(record: Record) -> Iterable[str]:
    return (caption(record),)


def rows(record: Record) -> str:
    """The rows for MEASURED of tuning.py."""
    major = record["device"]["capability"][0]
    written = []
    for dtype in DTYPES:
        found = [m for m in record["measurements"] if m["dtype"] == dtype]
        if not found:
            continue
        written.append(f"    ({major}, {ITEMSIZE[dtype]}): {{")
        for kernel in KERNELS:
            cells = [
                f"{m['dim']}: Config({_arguments(Config(**_named(m['best'], record['fields'])))})"
                for m in found
                if m["kernel"] == kernel
            ]
            if cells:
                written.append(f'        "{kernel}": {{{", ".join(cells)}}},')
        written.append("    },")
    return "\n".join(written)


def _arguments(given: Config) -> str:
    positional = [str(x) for x in given[: 5 if given.descriptors else 4]]
    rest = {name: x for name, x in zip(given._fields[5:], given[5:], strict=True) if x != Config._field_defaults[name]}
    return ", ".join(positional + [f"{name}={x}" for name, x in rest.items()])


def _named(config: Sequence[Any], fields: Sequence[str]) -> dict[str, Any]:
    """The numbers of a recorded tile by the record's own field names, without None."""
    return {name: x for name, x in zip(fields, config, strict=True) if x is not None}


def short(config: Sequence[Any], fields: Sequence[str] = Config._fields) -> str:
    """Format as in "16x64 w2 s3 p2": the tile, warps, stages, "tma" for the copy engine, programs.

    A record may have fields that tiles no longer have; these appear with their names.
    """
    named = _named(config, fields)
    given = Config(**{name: named.pop(name) for name in Config._fields if name in named})
    engine, programs = " tma" if given.descriptors else "", "" if given.programs == 1 else f" p{given.programs}"
    others = "".join(f" {name}={x}" for name, x in named.items())
    return f"{given.block_q}x{given.block_k} w{given.warps} s{given.stages}{engine}{programs}{others}"


def caption(record: Record) -> str:
    d, m = record["device"], record["machine"]
    tried = sum(len(x["candidates"]) for x in record["measurements"])
    text = f"{d['name']}, triton {m['versions']['triton']}: {tried} candidates, medians of {record['rounds']} rounds."
    return text + (f" Left out for lack of time: {', '.join(record['left_out'])}." if record["left_out"] else "")


def _table(record: Record) -> str:
    """One row per target: the best tile, and what it saves."""
    shown = [("kernel", "dtype", "D", "best", "us", "today", "us", "time / today's", "passed")]
    for m in record["measurements"]:
        passed = sum(c["why_not"] is None for c in m["candidates"])
        shown.append(
            (
                m["kernel"],
                m["dtype"],
                str(m["dim"]),
                short(m["best"], record["fields"]),
                f"{m['best_seconds'] * 1e6:.4g}",
                short(m["today"], record["fields"]),
                f"{m['today_seconds'] * 1e6:.4g}",
                markdown.number(m["best_seconds"] / m["today_seconds"], 3),
                f"{passed} of {len(m['candidates'])}",
            )
        )
    return markdown.table(shown)


def details(record: Record) -> str:
    """One row per candidate, the fastest of a target first."""
    shown: list[tuple[str, ...]] = [("target", "config", "us", "registers", "spills", "shared", "why not")]
    for m in record["measurements"]:
        for c in sorted(m["candidates"], key=lambda c: c["seconds"] or math.inf):
            us = "" if c["seconds"] is None else f"{c['seconds'] * 1e6:.4g}"
            numbers = ["" if c[key] is None else str(c[key]) for key in ("registers", "spills", "shared")]
            target, config = f"{m['kernel']} {m['dtype']} D{m['dim']}", short(c["config"], record["fields"])
            shown.append((target, config, us, *numbers, c["why_not"] or ""))
    return markdown.table(shown)
