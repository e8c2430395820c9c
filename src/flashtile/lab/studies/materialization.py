"""Study 7: no N x N array is ever allocated: the allocator sees every array, and the largest does not grow."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flashtile.backends import reference, tiles
from flashtile.lab.studies import canvas
from flashtile.lab.studies.allocations import tracked
from flashtile.lab.studies.study import Table, qkv
from flashtile.numerics.dtypes import Array
from flashtile.problem import Problem, describe

TITLE = "No N x N array is ever made"
QUESTION = "Is there really no large intermediate array, not even for a moment?"
D = BLOCK = 32
LENGTHS = (64, 128, 256, 512, 1024, 2048)
QUICK_LENGTHS = LENGTHS[:4]
ITEM = np.dtype(np.float64).itemsize  # all arrays here have elements of 8 bytes, or fewer
STANDARD, FA2, CAUSAL, FA1 = "standard", "FA2", "FA2, causal", "FA1"


@dataclass(frozen=True, slots=True)
class Tracked:
    """The arrays that NumPy allocated in one call, and the elements of the largest, without the results."""

    n: int
    arrays: int
    largest: int
    sizes: tuple[tuple[int, int], ...]  # elements, and the number of arrays of that size; largest first

    @property
    def smaller(self) -> float:
        """How many times smaller than N x N."""
        return self.n**2 / self.largest


@dataclass(frozen=True, slots=True)
class Materialization:
    d: int
    block: int
    ways: dict[str, tuple[Tracked, ...]]

    @property
    def caught(self) -> bool:
        """Whether tracking detects an N x N array if there is one."""
        return all(w.largest >= w.n**2 for w in self.ways[STANDARD])

    @property
    def holds(self) -> bool:
        block = self.block * max(self.block, self.d)
        constant = all(w.largest == block for way in (FA2, CAUSAL) for w in self.ways[way])
        # FA1 keeps m and l of every row in slow memory: N numbers each, and nothing else grows.
        linear = all(w.largest == max(block, w.n) for w in self.ways[FA1])
        return self.caught and constant and linear


def compute(quick: bool = False) -> Materialization:
    ways: dict[str, Callable[[Problem], tuple[Array, Array]]] = {
        STANDARD: reference.forward,
        FA2: lambda problem: tiles.forward(problem, "fa2", BLOCK, BLOCK),
        CAUSAL: lambda problem: tiles.forward(problem, "fa2", BLOCK, BLOCK),
        FA1: lambda problem: tiles.forward(problem, "fa1", BLOCK, BLOCK),
    }
    lengths = QUICK_LENGTHS if quick else LENGTHS
    return Materialization(
        D,
        BLOCK,
        {name: tuple(_track(forward, n, causal=name == CAUSAL) for n in lengths) for name, forward in ways.items()},
    )


def _track(forward: Callable[[Problem], tuple[Array, Array]], n: int, causal: bool) -> Tracked:
    problem = describe(*qkv(n, D), causal=causal)
    with tracked() as seen:
        out, lse = forward(problem)
    sizes = Counter(-(-size // ITEM) for size in seen.without(out, lse))
    return Tracked(n, sizes.total(), max(sizes), tuple(sorted(sizes.items(), reverse=True)))


def tables(record: Materialization) -> list[Table]:
    return [
        Table(
            f"The largest array besides the results, in elements; blocks of {record.block}, d = {record.d}",
            ("N", *record.ways, f"arrays, {FA2}", "smaller than N²"),
            tuple(
                (
                    f"{at[0].n}",
                    *(f"{w.largest:,}" for w in at),
                    f"{at[1].arrays:,}",
                    f"{at[1].smaller:,.0f}x",
                )
                for at in zip(*record.ways.values(), strict=True)
            ),
        ),
        Table(
            f"Every array of {FA2} at N = {record.ways[FA2][-1].n}, by size",
            ("elements", "arrays"),
            tuple((f"{elements:,}", f"{arrays:,}") for elements, arrays in record.ways[FA2][-1].sizes),
        ),
    ]


def findings(record: Materialization) -> list[str]:
    tiled, fa1, standard = record.ways[FA2], record.ways[FA1], record.ways[STANDARD]
    first, last = tiled[0], tiled[-1]
    largest = " to ".join(f"{x:,}" for x in sorted({w.largest for w in tiled}))
    return [
        f"From N = {first.n} to {last.n} the largest intermediate of tiled attention has {largest} elements "
        f"(blocks of {record.block}, d = {record.d}).",
        f"At N = {last.n} NumPy allocated {last.arrays:,} arrays, and none was larger: that is "
        f"{last.smaller:,.0f}x smaller than N² = {last.n**2:,}.",
        f"The check would detect one: for standard attention it found {standard[-1].largest:,} elements at "
        f"N = {standard[-1].n}.",
        f"The older FA1 order keeps m and l of every row: its largest is {fa1[-1].largest:,} at N = {fa1[-1].n}, one "
        "number per row, and still nothing N x N.",
    ]


_STYLES = {
    STANDARD: (canvas.RED, "s-"),
    FA1: (canvas.ORANGE, "D-"),
    FA2: (canvas.BLUE, "o-"),
    CAUSAL: (canvas.INK, "x"),
}


def draw(record: Materialization) -> canvas.Figure:
    figure, (growth, sizes) = canvas.panels(1, 2, width=12, height=4.6)
    n = [w.n for w in record.ways[FA2]]
    growth.plot(n, [x * x for x in n], ":", color=canvas.INK, label="N²")
    for name, (colour, style) in _STYLES.items():
        label = "standard: detected by the same check" if name == STANDARD else f"tiled, {name}"
        growth.plot(n, [w.largest for w in record.ways[name]], style, color=colour, label=label, markersize=6)
    growth.set_yscale("log", base=2)
    growth.set_ylim(2**8, 2**27)
    growth.set_yticks([2**p for p in range(8, 25, 4)], [f"{2**p:,}" for p in range(8, 25, 4)])
    canvas.doubling(growth, n)
    canvas.label(growth, "The largest array besides the results, elements", "N")
    canvas.legend(growth, loc="upper left")
    _draw_sizes(sizes, record)
    return figure


def _draw_sizes(ax: canvas.Axes, record: Materialization) -> None:
    last = record.ways[FA2][-1]
    shown = sorted(last.sizes)
    names = [f"{elements:,}" for elements, _ in shown]
    ax.barh(names, [arrays for _, arrays in shown], color=canvas.BLUE)
    for at, (_, arrays) in enumerate(shown):
        ax.annotate(f"{arrays:,}", (arrays, at), (4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.margins(x=0.15)
    ax.grid(False, axis="y")
    canvas.label(ax, f"All {last.arrays:,} arrays at N = {last.n}, FA2 order", "number of arrays", "elements")
