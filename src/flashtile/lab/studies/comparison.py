"""Comparison: one head computed in FA1 order, in FA2 order and by attention(), against standard attention."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashtile
from flashtile.backends import tiles
from flashtile.lab.studies import canvas
from flashtile.lab.studies.study import samples
from flashtile.numerics.dtypes import Array
from flashtile.numerics.schedule import Event, Grid, Tile
from flashtile.problem import describe

LIMIT = 1e-10  # for a float64 error
EPSILON = float(np.finfo(np.float64).eps)
PUBLIC = "attention()"  # with the tiles that its backend chooses
WAYS = ("fa1", "fa2", PUBLIC)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest difference of each way, in float64, and the number of tiles that the FA2 order computed."""

    n_q: int
    n_k: int
    d: int
    br: int
    bc: int
    errors: dict[str, float]
    computed: int
    skipped: int

    @property
    def worst(self) -> float:
        return max(self.errors.values())

    @property
    def ragged(self) -> bool:
        return self.n_q % self.br > 0 or self.n_k % self.bc > 0

    @property
    def skipped_share(self) -> float:
        return self.skipped / (self.skipped + self.computed)

    def cells(self) -> tuple[str, ...]:
        """The cells of a table row under HEAD."""
        return (
            f"{self.n_q} x {self.n_k}, {self.d}",
            f"{self.br} x {self.bc}",
            "yes" if self.ragged else "no",
            *(f"{self.errors[way]:.1e}" for way in WAYS),
        )


HEAD = ("queries x keys, d", "tile", "ragged", *WAYS)


def compare(n_q: int, n_k: int, d: int, br: int, bc: int, **options: Any) -> Comparison:
    q, k, v = samples((n_q, d), (n_k, d), (n_k, d))
    exact = flashtile.standard_attention(q, k, v, **options)
    found, computed = outputs(q, k, v, br, bc, **options)
    errors = {way: largest(out - exact) for way, out in found.items()}
    rows, columns = Grid(n_q, n_k, br, bc).shape
    return Comparison(n_q, n_k, d, br, bc, errors, computed, rows * columns - computed)


def outputs(q: Array, k: Array, v: Array, br: int, bc: int, **options: Any) -> tuple[dict[str, Array], int]:
    """The output of every way, and the number of tiles that the FA2 order computed."""
    problem = describe(q, k, v, **options)
    computed = 0

    def count(event: Event, machine: tiles.Machine) -> None:
        nonlocal computed
        computed += isinstance(event, Tile)

    fa1, _ = tiles.forward(problem, "fa1", br, bc)
    fa2, _ = tiles.forward(problem, "fa2", br, bc, count)
    return {"fa1": fa1[0, 0], "fa2": fa2[0, 0], PUBLIC: flashtile.attention(q, k, v, **options)}, computed


def largest(difference: Array) -> float:
    return float(np.abs(difference).max())


EDGE = 1e-18  # where a difference of exactly 0 is drawn on a logarithmic axis
STYLES: dict[str, dict[str, Any]] = {
    "fa1": {"color": canvas.ORANGE, "marker": "s", "markersize": 9, "markerfacecolor": "none", "label": "FA1 order"},
    "fa2": {"color": canvas.BLUE, "marker": "o", "markersize": 5, "label": "FA2 order"},
    PUBLIC: {"color": canvas.GREEN, "marker": "^", "markersize": 6, "label": PUBLIC},
}
_LINES: tuple[dict[str, Any], ...] = (
    {"color": canvas.RED, "linewidth": 1.5, "linestyle": "--", "label": f"limit, {LIMIT:.0e}"},
    {"color": canvas.MUTED, "linewidth": 1.2, "linestyle": ":", "label": "float64 epsilon"},
)


def shown(errors: Iterable[float]) -> list[float]:
    return [max(error, EDGE) for error in errors]


def draw_comparisons(ax: canvas.Axes, comparisons: Sequence[Comparison]) -> None:
    """Draw a line of marks for each comparison, on a horizontal axis of errors."""
    names = [f"{c.n_q} x {c.n_k},  {c.br} x {c.bc}" for c in comparisons]
    for way in WAYS:
        ax.plot(shown(c.errors[way] for c in comparisons), names, linestyle="", **STYLES[way])
    for at, style in zip((LIMIT, EPSILON), _LINES, strict=True):
        ax.axvline(at, **style)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(EDGE, 1e-8)
    ax.tick_params(axis="y", labelsize=8)
    canvas.label(ax, "Queries x keys, and the tile", "largest difference from standard attention")
    canvas.legend(ax, loc="center", bbox_to_anchor=(0.56, 0.5))


def error_axis(ax: canvas.Axes) -> None:
    """Set up a vertical axis of errors that includes the limit."""
    for at, style in zip((LIMIT, EPSILON), _LINES, strict=True):
        ax.axhline(at, **style)
    ax.set_yscale("log")
    ax.set_ylim(EDGE, 1e-8)
    canvas.legend(ax, loc="center", bbox_to_anchor=(0.5, 0.58))
