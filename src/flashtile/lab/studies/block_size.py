"""Study 3: what the tile size changes, and what it does not."""

from dataclasses import dataclass

import flashtile
from flashtile.backends import tiles
from flashtile.band import full
from flashtile.cost.traffic import Layout, Traffic, fa2_elements, standard_elements
from flashtile.lab.studies import canvas
from flashtile.lab.studies.comparison import LIMIT, STYLES, error_axis, largest, shown
from flashtile.lab.studies.memory import block_floats
from flashtile.lab.studies.study import Table, qkv
from flashtile.lab.units import size
from flashtile.numerics.dtypes import ITEMSIZE, Array
from flashtile.numerics.schedule import Event, Grid, Tile
from flashtile.problem import Problem, describe

TITLE = "The size of a tile"
QUESTION = "What does the block size change: the memory, the number of tiles, the work, the result?"
N, D = 512, 64
FLOAT32 = ITEMSIZE["float32"]
BLOCKS = (8, 16, 32, 48, 64, 100, 128, 256, 512)
QUICK_BLOCKS = (16, 32, 64, 100, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Block:
    """One run with tiles of block x block. Counts are in elements, taken from the events of the run."""

    block: int
    formula: int  # 2 B^2: S and P of one tile
    sram: int  # the most that was in the fast memory at once: S, P, Q, K, V, O, m, l and the factor
    tiles: int
    tile_elements: int  # summed over all tiles
    moved: int  # through the slow memory, both ways
    error: float


@dataclass(frozen=True, slots=True)
class BlockSize:
    n: int
    d: int
    blocks: tuple[Block, ...]

    @property
    def holds(self) -> bool:
        whole = all(b.tile_elements == self.n * self.n for b in self.blocks)
        return whole and max(b.error for b in self.blocks) < LIMIT


def compute(quick: bool = False) -> BlockSize:
    q, k, v = qkv(N, D)
    exact = flashtile.standard_attention(q, k, v)
    return BlockSize(N, D, tuple(_run(describe(q, k, v), exact, b) for b in (QUICK_BLOCKS if quick else BLOCKS)))


def _run(problem: Problem, exact: Array, block: int) -> Block:
    grid = Grid(N, N, block, block)
    traffic = Traffic(grid, Layout(D, D, problem.dtype))
    elements = most = 0

    def observe(event: Event, machine: tiles.Machine) -> None:
        nonlocal elements, most
        traffic.see(event)
        if isinstance(event, Tile):
            elements += machine.sram["S"].size
            most = max(most, sum(x.size for x in machine.sram.values()))

    out, _ = tiles.forward(problem, "fa2", block, block, observe)
    error = largest(out[0, 0] - exact)
    count = sum(traffic.tiles.values())
    return Block(block, block_floats(block), most, count, elements, traffic.elements, error)


def tables(record: BlockSize) -> list[Table]:
    return [
        Table(
            f"N = {record.n}, d = {record.d}, float32 bytes, float64 errors",
            ("block", "S and P", "all in SRAM", "tiles", "tile elements", "moved through HBM", "error"),
            tuple(
                (
                    f"{b.block}",
                    size(FLOAT32 * b.formula),
                    size(FLOAT32 * b.sram),
                    f"{b.tiles:,}",
                    f"{b.tile_elements:,}",
                    size(FLOAT32 * b.moved),
                    f"{b.error:.1e}",
                )
                for b in record.blocks
            ),
        )
    ]


def findings(record: BlockSize) -> list[str]:
    by_size = {b.block: b for b in record.blocks}
    small, large = by_size[16], by_size[128]
    worst = max(b.error for b in record.blocks)
    worth = min(b.block for b in record.blocks if b.moved < standard_elements(record.n, record.d))
    return [
        f"From blocks of {small.block} to {large.block}, {large.block // small.block}x as wide, S and P of a tile grow "
        f"{large.formula // small.formula}x, and there are {small.tiles // large.tiles}x fewer tiles "
        f"({small.tiles:,} to {large.tiles:,}).",
        f"All tiles together always hold {small.tile_elements:,} scores, N² = {record.n**2 / 1e6:.2f} M: the work does "
        "not depend on the tile size.",
        f"Wider blocks read K and V less often: {small.moved / large.moved:.1f}x less traffic. Blocks narrower than "
        f"{worth} move more than standard attention does: a tile should fill the fast memory.",
        f"The result is the same for every block; the largest error is {worst:.1e}.",
    ]


def draw(record: BlockSize) -> canvas.Figure:
    figure, (memory, count, moved, accuracy) = canvas.panels(1, 4, width=15, height=4.2)
    widths = [b.block for b in record.blocks]
    _draw_memory(memory, record, widths)
    _draw_counts(count, record, widths)
    _draw_moved(moved, record, widths)
    accuracy.plot(widths, shown(b.error for b in record.blocks), **STYLES["fa2"])
    error_axis(accuracy)
    canvas.label(accuracy, "The same accuracy", "block", "largest difference")
    for ax in (memory, count, moved, accuracy):
        canvas.doubling(ax, [b for b in widths if b & (b - 1) == 0])
    return figure


def _draw_memory(ax: canvas.Axes, record: BlockSize, widths: list[int]) -> None:
    ax.plot(widths, [FLOAT32 * block_floats(b) for b in widths], "--", color=canvas.MUTED, label="S and P, 2B²")
    ax.plot(widths, [FLOAT32 * b.sram for b in record.blocks], "o", color=canvas.BLUE, label="all in SRAM, counted")
    canvas.in_bytes(ax, 2**8, 2**25)
    canvas.label(ax, "A tile grows as B²", "block")
    canvas.legend(ax, loc="upper left")


def _draw_counts(ax: canvas.Axes, record: BlockSize, widths: list[int]) -> None:
    ax.plot(widths, [(record.n / b) ** 2 for b in widths], "--", color=canvas.MUTED, label="N²/B²")
    ax.plot(widths, [b.tiles for b in record.blocks], "o", color=canvas.BLUE, label="tiles, counted")
    ax.axhline(record.n**2, linestyle=":", color=canvas.MUTED, label="N²")
    ax.plot(widths, [b.tile_elements for b in record.blocks], "s", color=canvas.ORANGE, label="scores in all tiles")
    ax.set_yscale("log")
    ax.set_ylim(0.5, 3e9)
    canvas.label(ax, "Fewer tiles, the same work", "block")
    canvas.legend(ax, loc="upper left", ncols=2)


def _draw_moved(ax: canvas.Axes, record: BlockSize, widths: list[int]) -> None:
    n, d = record.n, record.d
    formula = [FLOAT32 * fa2_elements(n, n, d, d, b, b, full()) for b in widths]
    standard = FLOAT32 * standard_elements(n, d)
    ax.axhline(standard, color=canvas.RED, linestyle="--", label="standard, 4N² + 4Nd")
    ax.plot(widths, formula, "--", color=canvas.MUTED, label="tiled, 2Nd + N + 2Nd N/B")
    ax.plot(widths, [FLOAT32 * b.moved for b in record.blocks], "o", color=canvas.BLUE, label="tiled, counted")
    canvas.in_bytes(ax, 2**18, 2**26)
    canvas.label(ax, "Moved through HBM", "block")
    canvas.legend(ax)
