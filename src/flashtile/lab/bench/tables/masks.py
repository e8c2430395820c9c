"""A record of masks, as markdown: what each mask costs, and how calls with spans compare."""

from collections.abc import Iterable

from flashtile.lab.bench import markdown
from flashtile.lab.bench.markdown import number
from flashtile.lab.bench.masks import COSTS_AT
from flashtile.lab.bench.records import Record
from flashtile.lab.bench.tables.cpu import caption, times
from flashtile.lab.bench.tables.goals import summary

FIELDS: dict[str, type] = {"threads": int, "costs": list}


def parts(record: Record) -> Iterable[str]:
    return _costs(record), caption(record), summary(record)


def brief(record: Record) -> Iterable[str]:
    return caption(record), summary(record)


def _costs(record: Record) -> str:
    """One row per mask."""
    rows: list[tuple[str, ...]] = [
        (f"mask, {COSTS_AT} tokens", "how to say it", "pairs", "tiles", "spans", "BlockMask", "FlashMask", "dense mask")
    ]
    for x in record["costs"]:
        sizes = [x["spans"], x["block_mask"], x["flashmask"], x["dense"]]
        rows.append((x["mask"], f"`{x['code']}`", _percent(x["share"]), _percent(x["tiles"]), *map(_size, sizes)))
    return markdown.table(rows)


def details(record: Record) -> str:
    return times(record, {"ratios": lambda m: ", ".join(number(x) for x in m.get("ratios", {}).values())})


def _percent(x: float) -> str:
    return f"{100 * x:.0f}%"


def _size(n: int | None) -> str:
    if n is None:
        return "cannot say it"
    return f"{n} B" if n < 2**10 else f"{n / 2**10:.0f} KiB" if n < 2**20 else f"{n / 2**20:.0f} MiB"
