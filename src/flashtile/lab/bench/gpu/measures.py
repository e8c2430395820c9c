"""Numbers of a measured row to compare with bars: our time against a peer's, our rate against the device's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashtile.lab.bench.gpu.peers import CUDNN, FLEX, ORDERED, OURS, OURSELVES, PORTABLE, WIDE

TILE = 128  # additional keys that a window costs
SLACK = 1 << 20  # bytes: allocations are rounded up, schedulers keep counters

Row = dict[str, Any]


@dataclass(frozen=True)
class Measure:
    """A number of a row; None if the row has nothing to compare."""

    title: str
    of: Callable[[Row], float | None]
    more_is_better: bool = False


def best_peer(row: Row) -> str | None:
    """The fastest of the others."""
    others = _of_others(row["ratios"])
    return min(others, key=lambda name: others[name]["value"], default=None)


def _of_others(found: dict[str, Any]) -> dict[str, Any]:
    """The entries of peers other than our own variants."""
    return {name: x for name, x in found.items() if name not in OURSELVES}


def _over(peer: str) -> Callable[[Row], float | None]:
    return lambda row: row["ratios"][peer]["value"] if peer in row["ratios"] else None


def _over_best(row: Row) -> float | None:
    return min((ratio["value"] for ratio in _of_others(row["ratios"]).values()), default=None)


def _portable_over_flex(row: Row) -> float | None:
    times = row["times"]
    return times[FLEX]["median_s"] / times[PORTABLE]["median_s"] if {FLEX, PORTABLE} <= times.keys() else None


def _of_product(row: Row) -> float | None:
    return row["rates"][OURS] / row["ceiling"] if OURS in row["rates"] else None


def _of_window(ours: str) -> Callable[[Row], float | None]:
    """Time relative to the same shape without a window, in units of the keys left to visit."""

    def of(row: Row) -> float | None:
        times, whole, share = row["times"], row["unwindowed"], (row["window"] + TILE) / row["shape"]["n_k"]
        return times[ours]["median_s"] / (whole[ours]["median_s"] * share) if ours in times.keys() & whole else None

    return of


def _host(row: Row) -> float | None:
    return row["host"][OURS]["median_s"] * 1e6 if OURS in row["host"] else None


def _of_needed(row: Row) -> float | None:
    return row["grown"][OURS] / (row["needed"] + SLACK) if OURS in row["grown"] else None


def _difference(row: Row) -> float | None:
    """The difference from the nearest peer, since a single peer may be wrong; from our own variants if it is alone."""
    found = row["differences"]
    return min((_of_others(found) or found).values(), default=None)


OVER_FLEX = Measure(f"{FLEX} time / time", _over(FLEX), more_is_better=True)
PORTABLE_OVER_FLEX = Measure(f"{FLEX} time / time", _portable_over_flex, more_is_better=True)
OVER_CUDNN = Measure(f"{CUDNN} time / time", _over(CUDNN), more_is_better=True)
OVER_WIDE = Measure("time in bfloat16 / time", _over(WIDE), more_is_better=True)
IN_ORDER = Measure("time with deterministic=True / time", _over(ORDERED))
OVER_BEST = Measure("best peer's time / time", _over_best, more_is_better=True)
OF_PRODUCT = Measure("FLOPs per second / those of the matrix product", _of_product, more_is_better=True)
OF_COPY = Measure("K and V read per second / device copy", lambda row: row["shares"].get(OURS), more_is_better=True)
OF_WINDOW, PORTABLE_OF_WINDOW = (
    Measure(f"time / (full time * (window + {TILE}) / keys)", _of_window(ours)) for ours in (OURS, PORTABLE)
)
HOST = Measure("host time, us", _host)
FORWARD_MEMORY, BACKWARD_MEMORY = (
    Measure(f"peak beyond inputs and results / ({needed} + {SLACK >> 20} MiB)", _of_needed)
    for needed in ("lse", "delta and dQ in float32")
)
DIFFERENCE = Measure("norm of the difference / norm", _difference)
