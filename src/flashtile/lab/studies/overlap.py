"""Overlap, as in FlashAttention-3: exponentials of one tile run while the matrix units work on another."""

from dataclasses import dataclass

from flashtile.cost import traffic
from flashtile.lab.catalogue import chips
from flashtile.lab.studies import canvas
from flashtile.lab.studies.study import Table
from flashtile.lab.units import seconds

TITLE = "What overlapping can save"
QUESTION = "How much of a tile's time goes into exponentials, while the matrix units wait?"
GPUS = ("a100-40", "h100", "b200")
DRAWN = "h100"
BLOCK, DIM = 128, 128
EXPONENTIALS_PER_CLOCK = 16  # per processor, by NVIDIA's tables of arithmetic throughput


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile on one processor of a GPU, by published rates: seconds of its two products and its exponentials."""

    gpu: str
    name: str
    products: float
    exponentials: float

    @property
    def serial(self) -> float:
        """Without overlap."""
        return self.products + self.exponentials

    @property
    def overlapped(self) -> float:
        """With two tiles in flight, one uses the matrix units while the other computes exponentials."""
        return max(self.products, self.exponentials)

    @property
    def saved(self) -> float:
        return 1 - self.overlapped / self.serial


@dataclass(frozen=True, slots=True)
class Record:
    block: int
    dim: int
    tiles: tuple[Tile, ...]

    def of(self, gpu: str) -> Tile:
        return next(tile for tile in self.tiles if tile.gpu == gpu)


def compute(quick: bool = False) -> Record:
    return Record(BLOCK, DIM, tuple(_tile(gpu) for gpu in GPUS))


def _tile(gpu: str) -> Tile:
    chip, pairs = chips()[gpu], BLOCK * BLOCK
    flops_per_processor = chip.rates().flops / chip.processors
    exponentials_per_second = EXPONENTIALS_PER_CLOCK * chip.clock_mhz * 1e6
    products = pairs * traffic.forward_flops_per_pair(DIM, DIM) / flops_per_processor
    return Tile(gpu, chip.name, products, pairs / exponentials_per_second)


def tables(r: Record) -> list[Table]:
    return [
        Table(
            f"A tile of {r.block} x {r.block}, d = {r.dim}, 16 bits, on one processor, by published rates",
            ("GPU", "two products", "exponentials", "serial", "overlapped", "saved"),
            tuple(
                (
                    t.name,
                    *(seconds(x) for x in (t.products, t.exponentials, t.serial, t.overlapped)),
                    f"{t.saved:.0%}",
                )
                for t in r.tiles
            ),
        )
    ]


def findings(r: Record) -> list[str]:
    first, last = r.tiles[0], r.tiles[-1]
    return [
        f"From {first.name} to {last.name}, the products became {first.products / last.products:.1f} times as fast, "
        f"the exponentials {first.exponentials / last.exponentials:.1f} times.",
        f"So hiding the exponentials behind the products saves at most {first.saved:.0%} on the first and "
        f"{last.saved:.0%} on the last: the same principle gains more on newer hardware.",
    ]


def draw(r: Record) -> canvas.Figure:
    tile = r.of(DRAWN)
    figure, (serial, overlapped) = canvas.panels(2, 1, height=3.6)
    steps = 4
    _draw_lane(serial, 1, [(n * tile.serial, tile.products, n) for n in range(steps)])
    _draw_lane(serial, 0, [(n * tile.serial + tile.products, tile.exponentials, n) for n in range(steps)])
    pace = tile.overlapped
    _draw_lane(overlapped, 1, [(n * pace, tile.products, n) for n in range(steps)])
    _draw_lane(overlapped, 0, [((n + 1) * pace, tile.exponentials, n) for n in range(steps)])
    for ax, title in ((serial, "Serial"), (overlapped, "Overlapped: two tiles in flight")):
        ax.set_xlim(0, steps * tile.serial * 1.02)
        ax.set_ylim(-0.6, 1.6)
        ax.set_yticks([1, 0], ["matrix units", "exponentials"])
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_formatter(lambda value, _: seconds(value) if value else "0")
        canvas.label(ax, f"{title}, {tile.name}")
    return figure


def _draw_lane(ax: canvas.Axes, y: int, spans: list[tuple[float, float, int]]) -> None:
    """Draw spans of (start, length, tile number)."""
    for start, length, tile in spans:
        colour = canvas.BLUE if tile % 2 == 0 else canvas.ORANGE
        ax.barh(y, length, left=start, color=colour, height=0.62, edgecolor=canvas.PANEL)
        ax.text(start + length / 2, y, f"{tile + 1}", ha="center", va="center", fontsize=9, color=canvas.PANEL)
