"""Study 4: a picture of tiling: sixteen tokens in tiles of four, with the real numbers."""

from dataclasses import dataclass

import numpy as np

import flashtile
from flashtile.cost.trace import Trace
from flashtile.lab.studies import canvas
from flashtile.lab.studies.causal import kinds
from flashtile.lab.studies.comparison import LIMIT, largest
from flashtile.lab.studies.study import Table, qkv
from flashtile.numerics.dtypes import Array
from flashtile.numerics.schedule import Grid, Tile

TITLE = "A picture of tiling"
QUESTION = "In which order are the tiles visited, and what is kept between them?"
N, D, BLOCK = 16, 8, 4
Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The state after absorbing one tile of the FA2 order."""

    i: int
    j: int
    S: Rows  # [br, bc] scores
    P: Rows  # [br, bc] exp(S - m)
    m: tuple[float, ...]  # [br]
    l: tuple[float, ...]  # [br]
    factor: tuple[float, ...]  # [br] by which l and O were multiplied


@dataclass(frozen=True, slots=True)
class Tiling:
    n: int
    d: int
    block: int
    orders: dict[str, tuple[tuple[int, ...], ...]]  # fa1, fa2: position of each tile in the order, from 1
    first: tuple[Step, ...]  # the first four tiles
    weights: Rows  # [n, n] the softmax weights
    causal: tuple[tuple[str, ...], ...]  # each tile: skipped, partial or full
    causal_order: tuple[tuple[int, ...], ...]  # 0 for skipped tiles
    error: float

    @property
    def skipped(self) -> int:
        return sum(row.count("skipped") for row in self.causal)

    @property
    def processed(self) -> int:
        return sum(len(row) for row in self.causal) - self.skipped

    @property
    def holds(self) -> bool:
        return self.error < LIMIT and self.processed == max(max(row) for row in self.causal_order)


def compute(quick: bool = False) -> Tiling:  # always quick
    q, k, v = qkv(N, D)
    traces = {order: flashtile.trace(q, k, v, order=order, block_q=BLOCK, block_k=BLOCK) for order in ("fa1", "fa2")}
    causal = flashtile.trace(q, k, v, block_q=BLOCK, block_k=BLOCK, causal=True)
    exact = flashtile.standard_attention(q, k, v)
    weights = flashtile.probabilities(q, k, rows=np.arange(N))
    return Tiling(
        N,
        D,
        BLOCK,
        {order: _visits(trace) for order, trace in traces.items()},
        _steps(traces["fa2"])[:4],
        _plain(weights),
        kinds(Grid(N, N, BLOCK, BLOCK)),
        _visits(causal),
        max(largest(trace.results["out"] - exact) for trace in traces.values()),
    )


def _visits(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """The position of each tile in the order, from 1; 0 if it is never visited."""
    visits = np.zeros(trace.grid.shape, int)
    visited = [step.event for step in trace if isinstance(step.event, Tile)]
    for n, tile in enumerate(visited, 1):
        visits[tile.i, tile.j] = n
    return tuple(tuple(int(n) for n in row) for row in visits)


def _steps(trace: Trace) -> tuple[Step, ...]:
    return tuple(
        Step(
            step.event.i,
            step.event.j,
            _plain(step.numbers["S"]),
            _plain(step.numbers["P"]),
            *(tuple(float(x) for x in step.numbers[name]) for name in ("m", "l", "factor")),
        )
        for step in trace
        if isinstance(step.event, Tile)
    )


def _plain(x: Array) -> Rows:
    return tuple(tuple(float(y) for y in row) for row in x)


def tables(record: Tiling) -> list[Table]:
    return [
        Table(
            "The first four tiles, FA2 order: the state of query 0 after each",
            ("tile (row, column)", "scores of query 0", "m", "l", "factor"),
            tuple(
                (
                    f"({step.i}, {step.j})",
                    "  ".join(f"{x:+.2f}" for x in step.S[0]),
                    f"{step.m[0]:+.2f}",
                    f"{step.l[0]:.3f}",
                    f"{step.factor[0]:.3f}",
                )
                for step in record.first
            ),
        ),
        Table(
            "The order in which tiles are visited",
            ("row of tiles", "FA1: columns first", "FA2: rows first", "causal, FA2"),
            tuple(
                (f"{i}", *(_listed(order[i]) for order in (*record.orders.values(), record.causal_order)))
                for i in range(len(record.causal))
            ),
        ),
    ]


def _listed(visits: tuple[int, ...]) -> str:
    return "  ".join(f"{n or '-':>2}" for n in visits)


def findings(record: Tiling) -> list[str]:
    tiles = sum(len(row) for row in record.causal)
    raised = [n for n, step in enumerate(record.first[1:], 2) if step.factor[0] < 1]
    rises = (
        f"It rises at tile {' and '.join(map(str, raised))}, and the sums so far are scaled down."
        if raised
        else "It never rises after the first tile."
    )
    return [
        f"{record.n} x {record.n} scores in tiles of {record.block} x {record.block}: {tiles} tiles, one at a time in "
        "fast memory.",
        f"Query 0 meets its keys in {len(record.first)} tiles; its maximum goes from {record.first[0].m[0]:.2f} to "
        f"{record.first[-1].m[0]:.2f}. {rises}",
        f"Causal: {record.skipped} tiles are skipped, {record.processed} are processed.",
        f"The result differs from standard attention by {record.error:.1e}.",
    ]


def draw(record: Tiling) -> canvas.Figure:
    figure, axes = canvas.panels(2, 4, width=14, height=6.8)
    fa1, fa2, weights, causal = axes[:4]
    for ax, order, title in ((fa1, "fa1", "FA1: column by column"), (fa2, "fa2", "FA2: row by row")):
        _draw_order(ax, record, record.orders[order], title)
    _draw_weights(weights, record)
    _draw_causal(causal, record)
    for n, (ax, step) in enumerate(zip(axes[4:], record.first, strict=True), 1):
        _draw_step(ax, n, step, record)
    key = "Lower row, the first four tiles: scores, coloured by exp(S - m). m running maximum, l running sum, x factor"
    figure.supxlabel(key, fontsize=9.5, color=canvas.INK)
    return figure


def _draw_order(ax: canvas.Axes, record: Tiling, visits: tuple[tuple[int, ...], ...], title: str) -> None:
    last, b = record.n // record.block, record.block
    ax.imshow(visits, cmap="Blues", vmin=-2, vmax=last * last * 1.6, extent=(0, record.n, record.n, 0))
    for i, row in enumerate(visits):
        for j, visit in enumerate(row):
            at = ((j + 0.5) * b, (i + 0.5) * b)
            ax.text(*at, f"{visit}", ha="center", va="center", fontsize=11, color=canvas.ON_TILE)
    flat = {visit: (i, j) for i, row in enumerate(visits) for j, visit in enumerate(row)}
    path = [flat[n] for n in sorted(flat)]
    ax.plot([(j + 0.5) * b for _, j in path], [(i + 0.5) * b for i, _ in path], color=canvas.ORANGE, alpha=0.55)
    canvas.square(ax, record.n, record.block)
    canvas.label(ax, title, "key", "query")


def _draw_weights(ax: canvas.Axes, record: Tiling) -> None:
    image = ax.imshow(record.weights, cmap=canvas.WEIGHTS, extent=(0, record.n, record.n, 0))
    canvas.square(ax, record.n, record.block, colour="white")
    canvas.label(ax, "Weights, never stored whole", "key", "query")
    bar = ax.inset_axes((1.03, 0.0, 0.05, 1.0))
    ax.figure.colorbar(image, cax=bar).ax.tick_params(labelsize=8)


def _draw_causal(ax: canvas.Axes, record: Tiling) -> None:
    from matplotlib.patches import Rectangle

    b = record.block
    for i, row in enumerate(record.causal):
        for j, kind in enumerate(row):
            ax.add_patch(Rectangle((j * b, i * b), b, b, facecolor=canvas.TILES[kind]))
            named = f"{record.causal_order[i][j]}\n{kind}" if kind != "skipped" else kind
            ink = canvas.INK if kind == "skipped" else canvas.ON_TILE
            ax.text((j + 0.5) * b, (i + 0.5) * b, named, ha="center", va="center", fontsize=8, color=ink)
    canvas.square(ax, record.n, record.block)
    canvas.label(ax, f"Causal: {record.skipped} skipped, {record.processed} processed", "key", "query")


def _draw_step(ax: canvas.Axes, n: int, step: Step, record: Tiling) -> None:
    """Draw the weights exp(S - m) of one tile, and the state of its rows."""
    b = record.block
    ax.imshow(step.P, cmap=canvas.WEIGHTS, vmin=0, vmax=1, extent=(0, b, b, 0))
    for r, (scores, weights) in enumerate(zip(step.S, step.P, strict=True)):
        for c, (score, weight) in enumerate(zip(scores, weights, strict=True)):
            ink = canvas.ON_TILE if weight > 0.55 else "white"
            ax.text(c + 0.5, r + 0.5, f"{score:+.2f}", ha="center", va="center", fontsize=8.5, color=ink)
        state = f"m {step.m[r]:.2f}\nl {step.l[r]:.2f}\nx {step.factor[r]:.2f}"
        ax.text(b + 0.12, r + 0.5, state, ha="left", va="center", fontsize=7.5, color=canvas.INK)
    canvas.square(ax, b)
    first = step.j * b
    ax.set_xticks([c + 0.5 for c in range(b)], [f"{first + c}" for c in range(b)])
    ax.set_yticks([r + 0.5 for r in range(b)], [f"{step.i * b + r}" for r in range(b)])
    canvas.label(ax, f"Tile {n}", "key", "query" if n == 1 else "")
