"""trace(): a real attention call, event by event, with the numbers that every event left in SRAM."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashtile.backends import tiles
from flashtile.band import Band, Kind
from flashtile.checks.arguments import check_choice, check_head, check_numpy, check_size
from flashtile.checks.keywords import check_keywords
from flashtile.checks.shapes import check_gradients
from flashtile.numerics.dtypes import Array, narrow
from flashtile.numerics.schedule import FORWARD, Event, Grid, Tile
from flashtile.numerics.visibility import Visibility, Visible
from flashtile.options import Options
from flashtile.problem import Problem, describe
from flashtile.spans import limits_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

ORDERS = ("standard", *FORWARD, "backward")
TILE_NUMBERS = ("S", "P", "factor", "m", "l", "O", "dP", "dS", "dQ", "dK", "dV")


@dataclass(frozen=True, slots=True)
class Step:
    """One event, and copies of the blocks it read, created or changed."""

    event: Event
    numbers: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Trace:
    """Every step of one head. `results` are out and lse, or dq, dk and dv."""

    order: str
    grid: Grid
    band: Band
    spans: Any  # limits of the head, (n_q or 1, spans, 2); None without spans
    steps: tuple[Step, ...]
    results: dict[str, Array]

    @property
    def visible(self) -> Visible:
        return self.band if self.spans is None else Visibility(self.band, self.spans)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers for JSON; non-finite numbers become "inf", "-inf" or "nan"."""
        return {
            "order": self.order,
            "grid": asdict(self.grid),
            "band": asdict(self.band),
            "spans": None if self.spans is None else self.spans.tolist(),
            "steps": [
                {"event": type(s.event).__name__, **_plain_event(s.event), "numbers": _plain(s.numbers)} for s in self
            ],
            "results": _plain(self.results),
        }


def trace(
    q: Any,
    k: Any,
    v: Any,
    *,
    order: str = "fa2",
    block_q: int = 16,
    block_k: int = 16,
    dout: Any = None,
    **options: "Unpack[Options]",
) -> Trace:
    """Run one head, (n, d) NumPy arrays, tile by tile, and record every event with its numbers.

    order is "standard" (whole rows, ignoring block_k), "fa1", "fa2", or "backward" (which takes the gradient of the
    output as `dout`).
    """
    check_keywords("trace", options, Options.__annotations__)
    if "spans" in options:
        options["spans"] = limits_of(options["spans"])
    check_choice("order", order, ORDERS)
    check_numpy(q, options, k=k, v=v, dout=dout)
    check_head(q=q, k=k, v=v)
    problem = describe(q, k, v, **options)
    n_k = problem.k_lengths[0]
    blocks = check_size("block_q", block_q), check_size("block_k", block_k)
    if order == "standard":
        blocks = blocks[0], max(n_k, 1)
    steps: list[Step] = []

    def observe(event: Event, machine: tiles.Machine) -> None:
        names = TILE_NUMBERS if isinstance(event, Tile) else (event.name,)
        steps.append(Step(event, {n: machine.sram[n].copy() for n in names if n in machine.sram}))

    results = _run(problem, order, blocks, dout, observe)
    grid, band = Grid(problem.n_q, n_k, *blocks), problem.band_for(problem.n_q, n_k)
    spans = None if problem.spans is None else problem.spans[0, 0]
    return Trace(order, grid, band, spans, tuple(steps), results)


def _run(problem: Problem, order: str, blocks: tuple[int, int], dout: Any, observe: tiles.Observer) -> dict[str, Array]:
    if order == "standard":
        out, lse = tiles.standard(problem, blocks[0], observe)
        return {"out": out[0, 0], "lse": lse[0, 0]}
    if order in FORWARD:
        out, lse = tiles.forward(problem, order, *blocks, observe)
        return {"out": out[0, 0], "lse": lse[0, 0]}
    out, lse = tiles.forward(problem, "fa2", *blocks)
    dout, *_ = check_gradients(problem, dout, narrow(out[0, 0], problem.out_dtype), lse[0, 0], None)
    grads = tiles.backward(problem, dout, out, lse, None, *blocks, observe)
    return {"dq": grads.dq[0, 0], "dk": grads.dk[0, 0], "dv": grads.dv[0, 0]}


def _plain_event(event: Event) -> dict[str, Any]:
    return {name: x.name.lower() if isinstance(x, Kind) else x for name, x in asdict(event).items()}


def _plain(arrays: dict[str, Array]) -> dict[str, Any]:
    return {name: _plain_list(x.tolist()) for name, x in arrays.items()}


def _plain_list(x: Any) -> Any:
    if isinstance(x, list):
        return [_plain_list(y) for y in x]
    return x if np.isfinite(x) else str(x)
