"""Study 5: causal attention, tile by tile: the same result, with about half of the tiles skipped."""

from dataclasses import dataclass

from flashtile.band import Kind, causal
from flashtile.cost.traffic import tile_counts
from flashtile.lab.studies import canvas
from flashtile.lab.studies.comparison import HEAD, LIMIT, Comparison, compare, draw_comparisons
from flashtile.lab.studies.study import Table
from flashtile.numerics.schedule import Grid

TITLE = "Causal attention"
QUESTION = "If a query sees only the keys before it, does tiling still match, and how much work does it avoid?"
D = 32
# queries, keys, rows and columns of a tile
SHAPES = (
    (64, 64, 16, 16),
    (256, 256, 32, 32),
    (512, 512, 64, 64),
    (100, 100, 16, 16),
    (257, 257, 32, 32),
    (333, 333, 64, 64),
    (256, 256, 64, 16),
    (256, 256, 16, 64),
    (301, 301, 48, 20),
    (50, 200, 16, 16),
)
COUNTED = (1, 2, 4, 8, 16, 32, 64, 128)  # tiles per side
BLOCK = 16
DRAWN = (96, 24, 8)  # N, rows and columns of a tile, for the picture of unequal blocks


@dataclass(frozen=True, slots=True)
class Counted:
    """Tiles of a causal square, `side` x `side` of them."""

    side: int
    skipped: int
    partial: int
    full: int

    @property
    def skipped_share(self) -> float:
        return self.skipped / self.side**2


@dataclass(frozen=True, slots=True)
class Causal:
    limit: float
    comparisons: tuple[Comparison, ...]
    counted: tuple[Counted, ...]
    drawn: tuple[int, int, int]
    kinds: tuple[tuple[str, ...], ...]  # of the drawn tiles

    @property
    def worst(self) -> float:
        return max(c.worst for c in self.comparisons)

    @property
    def holds(self) -> bool:
        return self.worst < self.limit


def compute(quick: bool = False) -> Causal:  # always quick
    n, *blocks = DRAWN
    return Causal(
        LIMIT,
        tuple(compare(n_q, n_k, D, br, bc, causal=True) for n_q, n_k, br, bc in SHAPES),
        tuple(_count(side) for side in COUNTED),
        DRAWN,
        kinds(Grid(n, n, *blocks)),
    )


def _count(side: int) -> Counted:
    n = side * BLOCK
    counts = tile_counts(causal(), n, n, BLOCK, BLOCK)
    return Counted(side, counts[Kind.SKIPPED], counts[Kind.PARTIAL], counts[Kind.FULL])


def kinds(grid: Grid) -> tuple[tuple[str, ...], ...]:
    """The kind of every tile in causal attention: skipped, partial or full."""
    rows = []
    for i in range(grid.shape[0]):
        found = dict(grid.across(causal(), i))
        rows.append(tuple(found.get(j, Kind.SKIPPED).name.lower() for j in range(grid.shape[1])))
    return tuple(rows)


def tables(record: Causal) -> list[Table]:
    return [
        Table(
            f"Causal: largest difference from standard attention, float64 (the limit is {record.limit:.0e})",
            HEAD,
            tuple(c.cells() for c in record.comparisons),
        ),
        Table(
            "Tiles of the same shapes",
            (*HEAD[:2], "computed", "skipped", "share skipped"),
            tuple(
                (*c.cells()[:2], f"{c.computed}", f"{c.skipped}", f"{c.skipped_share:.1%}") for c in record.comparisons
            ),
        ),
        Table(
            "Tiles of a causal square",
            ("tiles per side", "skipped", "partial", "full", "share skipped"),
            tuple(
                (f"{c.side}", f"{c.skipped:,}", f"{c.partial:,}", f"{c.full:,}", f"{c.skipped_share:.1%}")
                for c in record.counted
            ),
        ),
    ]


def findings(record: Causal) -> list[str]:
    ragged = sum(c.ragged for c in record.comparisons)
    unequal = sum(c.br != c.bc for c in record.comparisons)
    last = record.counted[-1]
    return [
        f"{len(record.comparisons)} shapes, {ragged} of them ragged and {unequal} with unequal blocks: the largest "
        f"difference from standard attention is {record.worst:.1e}.",
        f"With {last.side} tiles per side, {last.skipped_share:.1%} of the tiles are skipped: nothing of them is "
        "loaded or computed. The share is (T - 1) / 2T, which approaches one half.",
        f"Only the {last.partial:,} tiles on the diagonal need a mask; {last.full:,} are computed without one.",
    ]


def draw(record: Causal) -> canvas.Figure:
    figure, (picture, share, errors) = canvas.panels(1, 3, width=13, height=4.4)
    _draw_tiles(picture, record)
    sides = [c.side for c in record.counted]
    share.plot(sides, [(t - 1) / (2 * t) for t in sides], "--", color=canvas.MUTED, label="(T - 1) / 2T")
    share.plot(sides, [c.skipped_share for c in record.counted], "o", color=canvas.BLUE, label="skipped, counted")
    share.axhline(0.5, color=canvas.GREEN, linestyle=":", label="one half")
    share.set_ylim(-0.02, 0.56)
    canvas.doubling(share, sides)
    canvas.label(share, "Share of tiles skipped", "tiles per side, T")
    canvas.legend(share, loc="lower right")

    draw_comparisons(errors, record.comparisons)
    return figure


def _draw_tiles(ax: canvas.Axes, record: Causal) -> None:
    from matplotlib.patches import Patch, Rectangle

    n, br, bc = record.drawn
    for i, row in enumerate(record.kinds):
        for j, kind in enumerate(row):
            ax.add_patch(Rectangle((j * bc, i * br), bc, br, facecolor=canvas.TILES[kind], edgecolor=canvas.PANEL))
    ax.plot([0, n], [0, n], color=canvas.INK, linewidth=1.2)
    canvas.square(ax, n)
    canvas.label(ax, f"Unequal blocks: {br} x {bc}, N = {n}", "key", "query")
    kinds = [Patch(color=colour, label=kind) for kind, colour in canvas.TILES.items()]
    canvas.legend(ax, handles=kinds, loc="upper right", framealpha=1.0)
