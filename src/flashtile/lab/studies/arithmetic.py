"""Worked examples: why N x N is expensive, why a tile fits, and how traffic falls as SRAM grows."""

import math
from dataclasses import dataclass

from flashtile.band import ceil_div
from flashtile.cost.traffic import fa1_block, fa1_elements, least_elements, standard_elements
from flashtile.lab.studies import canvas
from flashtile.lab.studies.study import Table
from flashtile.lab.units import quantity, short, size
from flashtile.numerics.dtypes import ITEMSIZE

TITLE = "Worked examples"
QUESTION = "What are the numbers?"
SRAMS = tuple(1 << p for p in range(12, 19))  # elements
SHAPES = ((1024, 64), (8192, 128))  # N, d
LEADING = 12  # tiled is 2Nd + Tc (3Nd + 4N) with Tc = 4Nd / M columns of tiles: 12 N^2 d^2 / M and lower terms


@dataclass(frozen=True, slots=True)
class Line:
    """A product written out. Without a dtype it is a count, not a number of bytes."""

    what: str
    sum: str
    value: int
    dtype: str | None

    @property
    def result(self) -> str:
        return f"{self.value:,}" if self.dtype is None else f"{self.value:,} B = {size(self.value)}"


def line(what: str, *factors: int, dtype: str | None = None) -> Line:
    """Multiply the factors, and the bytes of an element; the text and the value come from the same factors."""
    words, value = [f"{factor:,}" for factor in factors], math.prod(factors)
    if dtype is not None:
        words, value = [*words, f"{ITEMSIZE[dtype]} B"], value * ITEMSIZE[dtype]
    return Line(what, " x ".join(words), value, dtype)


@dataclass(frozen=True, slots=True)
class Example:
    name: str
    title: str
    lines: tuple[Line, ...]

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """What, sum and result of each line, and the total if several have bytes."""
        rows = tuple((part.what, part.sum, part.result) for part in self.lines)
        if sum(part.dtype is not None for part in self.lines) < 2:
            return rows
        return (*rows, ("together", "", f"{self.total:,} B = {size(self.total)}"))

    @property
    def total(self) -> int:
        """Bytes of all lines that have a dtype."""
        return sum(part.value for part in self.lines if part.dtype is not None)


@dataclass(frozen=True, slots=True)
class Moved:
    """Elements moved through HBM for one head, forward, with an SRAM of `sram` elements."""

    n: int
    d: int
    sram: int
    block: int  # columns of a tile, so that four blocks fit
    columns: int  # of tiles
    tiled: int  # FlashAttention-1, exactly
    order: float  # N^2 d^2 / M, its order of growth
    standard: int
    least: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    examples: tuple[Example, ...]
    moved: tuple[Moved, ...]

    @property
    def holds(self) -> bool:
        """With many tiles, the exact count is close to its leading term."""
        return all(1 < m.tiled / (LEADING * m.order) < 1.2 for m in self.moved if m.columns >= 8)


def compute(quick: bool = False) -> Arithmetic:  # always quick
    return Arithmetic(_examples(), tuple(_moved(n, d, sram) for n, d in SHAPES for sram in SRAMS))


def _examples() -> tuple[Example, ...]:
    long, course, exercise, article = 128 << 10, 8192, 4096, 2000
    return (
        Example(
            "long-context",
            f"The cost of O(N²): {short(long)} tokens",
            (line("one table of scores", long, long, dtype="float32"),),
        ),
        Example(
            "two-tables",
            f"N = {course}, one head",
            (line("scores S", course, course, dtype="float32"), line("weights P", course, course, dtype="float32")),
        ),
        Example(
            "tile",
            "A tile of B = 64, d = 128",
            (
                line("block of Q", 64, 128, dtype="float16"),
                line("block of K", 64, 128, dtype="float16"),
                line("block of V", 64, 128, dtype="float16"),
                line("scratch: the scores of the tile", 64, 64, dtype="float32"),
            ),
        ),
        Example(
            "exercise-scores",
            f"Exercise: N = {exercise}",
            (line("scores", exercise, exercise), line("one buffer of them", exercise, exercise, dtype="float32")),
        ),
        Example("exercise-tile", "Exercise: a tile of B = 32, d = 128", (line("one block", 32, 128, dtype="float16"),)),
        Example(
            "article",
            f"N = {article} tokens",
            (line("scores", article, article), line("one table of them", article, article, dtype="float16")),
        ),
    )


def _moved(n: int, d: int, sram: int) -> Moved:
    block = fa1_block(sram, d)
    return Moved(
        n,
        d,
        sram,
        block,
        ceil_div(n, block),
        fa1_elements(n, d, block),
        n * n * d * d / sram,
        standard_elements(n, d),
        least_elements(n, d),
    )


def tables(record: Arithmetic) -> list[Table]:
    examples = [Table(example.title, ("what", "sum", "result"), example.rows) for example in record.examples]
    traffic = [
        Table(
            f"Elements through HBM by the size of SRAM, N = {n}, d = {d}",
            ("SRAM", "block", "columns", "tiled", "N²d²/M", "standard", "least"),
            tuple(
                (
                    short(m.sram),
                    f"{m.block}",
                    f"{m.columns:,}",
                    *(quantity(elements, "") for elements in (m.tiled, m.order, m.standard, m.least)),
                )
                for m in record.moved
                if (m.n, m.d) == (n, d)
            ),
        )
        for n, d in dict.fromkeys((m.n, m.d) for m in record.moved)
    ]
    return examples + traffic


def findings(record: Arithmetic) -> list[str]:
    found = {example.name: example for example in record.examples}
    two, tile = found["two-tables"], found["tile"]
    small, large = record.moved[-len(SRAMS)], record.moved[-1]
    return [
        f"{found['long-context'].title}: {size(found['long-context'].total)} for one intermediate matrix.",
        f"{two.title}: {size(two.lines[0].value)} per table, {size(two.total)} for both.",
        f"{tile.title}: {size(tile.lines[0].value)} per block, about {size(tile.total)} in total. It fits where the "
        "tables never will.",
        f"{found['article'].title}: {found['article'].lines[0].value:,} scores, {found['article'].total / 1e6:.0f} MB.",
        f"N = {large.n}, d = {large.d}: {large.sram // small.sram}x the SRAM reduces the traffic by "
        f"{small.tiled / large.tiled:.0f}x.",
    ]


def draw(record: Arithmetic) -> canvas.Figure:
    shapes = list(dict.fromkeys((m.n, m.d) for m in record.moved))
    figure, axes = canvas.panels(1, len(shapes), width=11, height=4.2)
    for ax, (n, d) in zip(axes, shapes, strict=True):
        moved = [m for m in record.moved if (m.n, m.d) == (n, d)]
        srams = [m.sram for m in moved]
        ax.axhline(moved[0].standard, color=canvas.RED, linestyle="--", label="standard, 4N² + 4Nd")
        ax.plot(srams, [m.tiled for m in moved], "o-", color=canvas.BLUE, label="tiled, FA1 order")
        ax.plot(srams, [LEADING * m.order for m in moved], ":", color=canvas.INK, label=f"{LEADING} N²d²/M")
        ax.axhline(moved[0].least, color=canvas.GREEN, linestyle="--", label="least possible")
        ax.set_yscale("log")
        canvas.doubling(ax, srams)
        canvas.label(ax, f"N = {n}, d = {d}", "SRAM, elements", "elements moved")
        ax.set_ylim(moved[0].least / 12)
        canvas.legend(ax, loc="lower left")
    return figure
