"""Study 1: the tiled result is the standard one, for all tiles, orders and magnitudes of scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import flashtile
from flashtile import dispatch
from flashtile.backends import reference, tiles
from flashtile.lab.studies import canvas
from flashtile.lab.studies.comparison import (
    EDGE,
    HEAD,
    LIMIT,
    STYLES,
    Comparison,
    compare,
    draw_comparisons,
    error_axis,
    largest,
    outputs,
    shown,
)
from flashtile.lab.studies.study import Table, qkv, samples
from flashtile.numerics.dtypes import FLOATS, Array, narrow, widen
from flashtile.numerics.softmax import online_softmax
from flashtile.problem import describe

TITLE = "The same result"
QUESTION = "Is tiled attention the same function as standard attention, or an approximation of it?"
# queries, keys, head dim, rows and columns of a tile
SHAPES = (
    (64, 64, 32, 16, 16),
    (128, 128, 64, 32, 32),
    (256, 256, 64, 64, 64),
    (512, 512, 64, 128, 128),
    (1024, 1024, 64, 64, 64),
    (100, 100, 32, 16, 16),
    (257, 257, 64, 64, 64),
    (333, 333, 40, 50, 50),
    (1000, 1000, 64, 96, 56),
    (1024, 1024, 128, 128, 100),
    (37, 190, 16, 16, 32),
)
QUICK_SHAPES = tuple(shape for shape in SHAPES if shape[0] < 1000) + SHAPES[4:5]
BLOCKS = (4, 8, 16, 24, 32, 64, 100, 128, 256)
QUICK_BLOCKS = (16, 32, 64, 100, 128, 256)
CHUNKS = (1, 3, 10, 32, 100, 333, 1000)
EXTREME = 1000.0


@dataclass(frozen=True, slots=True)
class Chunked:
    """Online softmax over chunks, compared with softmax over the whole row."""

    chunk: int
    error: float


@dataclass(frozen=True, slots=True)
class Rounded:
    """The errors of standard attention and of tiles in a dtype, both against float64."""

    dtype: str
    standard: float
    tiled: float


@dataclass(frozen=True, slots=True)
class Extreme:
    """Scores so large that exp() overflows, or so small that it underflows."""

    name: str
    lowest: float
    highest: float
    naive_finite: float  # finite share of the output if no maximum is subtracted
    finite: float  # the same for all tiled ways
    error: float


@dataclass(frozen=True, slots=True)
class Equivalence:
    limit: float
    backend: str  # the one that attention() chose
    comparisons: tuple[Comparison, ...]
    blocks: tuple[Comparison, ...]
    chunks: tuple[Chunked, ...]
    dtypes: tuple[Rounded, ...]
    extremes: tuple[Extreme, ...]

    @property
    def worst(self) -> float:
        return max(c.worst for c in (*self.comparisons, *self.blocks))

    @property
    def holds(self) -> bool:
        exact = (self.worst, *(c.error for c in self.chunks), *(e.error for e in self.extremes))
        rounded = all(r.tiled <= 2 * r.standard for r in self.dtypes if r.dtype != "float64")
        return max(exact) < self.limit and rounded and all(e.finite == 1 for e in self.extremes)


def compute(quick: bool = False) -> Equivalence:
    q, k, v = qkv(256, 64)
    return Equivalence(
        LIMIT,
        dispatch.choose(describe(q, k, v)).name,
        tuple(compare(*shape) for shape in (QUICK_SHAPES if quick else SHAPES)),
        tuple(compare(256, 256, 64, b, b) for b in (QUICK_BLOCKS if quick else BLOCKS)),
        tuple(_chunked(chunk) for chunk in CHUNKS),
        tuple(_rounded(dtype) for dtype in FLOATS),
        tuple(_extreme(name, scores) for name, scores in _extreme_scores().items()),
    )


def _chunked(chunk: int) -> Chunked:
    (x,) = samples((64, 1000))
    x = 10 * x  # so that the maximum rises many times
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return Chunked(chunk, largest(online_softmax(x, chunk) - e / e.sum(axis=1, keepdims=True)))


def _rounded(dtype: str) -> Rounded:
    problem = describe(*(narrow(x, dtype) for x in qkv(256, 64)))
    exact, _ = reference.forward(problem)

    def error(out: Array) -> float:
        return largest(widen(narrow(out, dtype), np.float64) - exact)

    return Rounded(dtype, error(reference.forward(problem, dtype)[0]), error(tiles.forward(problem, "fa2", 32, 32)[0]))


def _extreme_scores() -> dict[str, Array]:
    """A row of scores for 64 keys, the same for every query."""
    turns = np.where(np.arange(64) % 2, EXTREME, -EXTREME)
    late = np.full(64, -EXTREME)
    late[-1] = EXTREME
    return {
        "all +1000": np.full(64, EXTREME),
        "all -1000": np.full(64, -EXTREME),
        "+1000 and -1000 in turn": turns,
        "rising from -1000 to +1000": np.linspace(-EXTREME, EXTREME, 64),
        "-1000, and +1000 in the last tile": late,
    }


def _extreme(name: str, scores: Array) -> Extreme:
    (v,) = samples((64, 8))
    q, k = np.ones((64, 1)), scores[:, None]  # with a scale of 1, S_ij is scores[j]
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(q @ k.T)
        naive = e / e.sum(axis=1, keepdims=True) @ v
    exact = flashtile.standard_attention(q, k, v, scale=1.0)
    tiled = np.stack(list(outputs(q, k, v, 16, 16, scale=1.0)[0].values()))
    error = largest(tiled - exact)
    return Extreme(name, float(scores.min()), float(scores.max()), _finite(naive), _finite(tiled), error)


def _finite(x: Array) -> float:
    return float(np.isfinite(x).mean())


def tables(record: Equivalence) -> list[Table]:
    return [
        Table(
            f"Largest difference from standard attention, float64 (the limit is {record.limit:.0e})",
            HEAD,
            tuple(c.cells() for c in record.comparisons),
        ),
        Table(
            "Online softmax of 1000 columns against softmax of the whole row",
            ("chunk", "largest difference"),
            tuple((f"{c.chunk}", f"{c.error:.1e}") for c in record.chunks),
        ),
        Table(
            "Rounding: largest error against float64, N = 256, d = 64",
            ("dtype", "standard attention", "tiled"),
            tuple((r.dtype, f"{r.standard:.1e}", f"{r.tiled:.1e}") for r in record.dtypes),
        ),
        Table(
            "Scores that exp() alone cannot handle",
            ("scores", "finite without the maximum", "finite, tiled", "largest difference"),
            tuple((e.name, f"{e.naive_finite:.0%}", f"{e.finite:.0%}", f"{e.error:.1e}") for e in record.extremes),
        ),
    ]


def findings(record: Equivalence) -> list[str]:
    ragged = sum(c.ragged for c in record.comparisons)
    longest = max(c.n_q for c in record.comparisons)
    broken = sum(e.naive_finite < 1 for e in record.extremes)
    return [
        f"{len(record.comparisons)} shapes up to N = {longest}, {ragged} of them not divisible by the tile: "
        f"the largest difference from standard attention is {record.worst:.1e}.",
        f"Tiles from {record.blocks[0].br} to {record.blocks[-1].br} rows give the same result, in both orders; "
        f"so does attention(), which ran on the {record.backend} backend.",
        f"Online softmax in chunks of {record.chunks[0].chunk} to {record.chunks[-1].chunk} columns is off by at most "
        f"{max(c.error for c in record.chunks):.1e}.",
        f"With scores of {record.extremes[0].highest:+.0f} and {record.extremes[1].lowest:.0f}, exp() without the "
        f"maximum fails in {broken} of {len(record.extremes)} cases; tiles stay finite, and are off by at most "
        f"{max(e.error for e in record.extremes):.1e}.",
        "Tiling changes only the order of the sums: the remaining difference is rounding.",
    ]


def draw(record: Equivalence) -> canvas.Figure:
    figure, (shapes, blocks, chunks) = canvas.panels(1, 3, width=13, height=4.4)
    draw_comparisons(shapes, record.comparisons)
    widths = [c.br for c in record.blocks]
    for order in ("fa1", "fa2"):
        blocks.plot(widths, shown(c.errors[order] for c in record.blocks), **STYLES[order])
    canvas.doubling(blocks, [width for width in widths if width & (width - 1) == 0])
    canvas.label(blocks, "Block size (N = 256, d = 64)", "rows and columns of a tile", "largest difference")

    style: dict[str, Any] = {"color": canvas.PURPLE, "marker": "D", "markersize": 6, "label": "online softmax"}
    chunks.plot([c.chunk for c in record.chunks], shown(c.error for c in record.chunks), clip_on=False, **style)
    for c in record.chunks:
        if c.error == 0:
            chunks.annotate("exactly 0", (c.chunk, EDGE), (-8, 6), textcoords="offset points", ha="right", fontsize=8.5)
    chunks.set_xscale("log")
    canvas.label(chunks, "Online softmax", "columns at a time, of 1000", "largest difference")
    for ax in (blocks, chunks):
        error_axis(ax)
    return figure
