"""Tile orders as streams of events (Load, Zero, Tile, Store): FA1, FA2, backward, and standard attention.

tiles.py executes these streams, traffic.py adds them up, and the viewer replays them, so what is counted and drawn is
what is computed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from flashtile.band import Kind, ceil_div, cuts
from flashtile.numerics.visibility import Visibility, Visible


@dataclass(frozen=True, slots=True)
class _Block:
    """An event of block n of an array."""

    name: str
    n: int


class Load(_Block):
    """The block moves from HBM to SRAM."""


class Zero(_Block):
    """The block starts in SRAM as zeros, without a read."""


class Store(_Block):
    """The block moves from SRAM to HBM."""


class Make(_Block):
    """The block is computed completely, from what is in SRAM."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Query block i and key block j are processed."""

    i: int
    j: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel begins, with nothing in SRAM; it reads and writes these arrays. A stream without one is one kernel."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


Event = Load | Zero | Tile | Store | Launch | Make

STANDARD = (
    Launch("scores", ("Q", "K"), ("S",)),
    Launch("softmax", ("S",), ("P",)),
    Launch("values", ("P", "V"), ("O",)),
)
KEY_ARRAYS = ("K", "V", "dK", "dV")  # divided into blocks of keys; the other arrays into blocks of queries


@dataclass(frozen=True, slots=True)
class Grid:
    """n_q x n_k scores divided into tiles of br x bc; the last ones may be smaller."""

    n_q: int
    n_k: int
    br: int
    bc: int

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns of tiles."""
        return ceil_div(self.n_q, self.br), ceil_div(self.n_k, self.bc)

    def rows(self, i: int) -> slice:
        return slice(i * self.br, min((i + 1) * self.br, self.n_q))

    def cols(self, j: int) -> slice:
        return slice(j * self.bc, min((j + 1) * self.bc, self.n_k))

    def block(self, name: str, n: int) -> slice:
        """The rows of block n of an array, named as in the events."""
        return self.cols(n) if name in KEY_ARRAYS else self.rows(n)

    def across(self, visible: Visible, i: int) -> Iterator[tuple[int, Kind]]:
        """The tiles of row i that are not skipped."""
        if isinstance(visible, Visibility):
            return chain(*visible.rows(self.n_q, self.n_k, self.br, self.bc)[i])
        r = self.rows(i)
        return iter(cuts(visible, r.start, r.stop, self.n_k, self.bc))

    def down(self, visible: Visible, j: int) -> Iterator[tuple[int, Kind]]:
        """The tiles of column j that are not skipped."""
        if isinstance(visible, Visibility):
            return iter(visible.columns(self.n_q, self.n_k, self.br, self.bc)[j])
        c = self.cols(j)
        return iter(cuts(visible.T, c.start, c.stop, self.n_q, self.br))


def fa2_forward(visible: Visible, grid: Grid) -> Iterator[Event]:
    """FlashAttention-2: row by row of tiles. Each block of O is computed in SRAM and written once."""
    for i in range(grid.shape[0]):
        yield Load("Q", i)
        yield Zero("O", i)
        for j, kind in grid.across(visible, i):
            yield Load("K", j)
            yield Load("V", j)
            yield Tile(i, j, kind)
        yield Store("O", i)
        yield Store("L", i)


def fa1_forward(visible: Visible, grid: Grid) -> Iterator[Event]:
    """FlashAttention-1: column by column of tiles. O, m and l of every block go to HBM and back each time.

    They start in HBM as 0, -inf and 0, as in algorithm 1 of FlashAttention (docs/algorithm.md, Sources).
    """
    for j in range(grid.shape[1]):
        tiles = list(grid.down(visible, j))
        if not tiles:
            continue
        yield Load("K", j)
        yield Load("V", j)
        for i, kind in tiles:
            yield Load("Q", i)
            for name in ("m", "l", "O"):
                yield Load(name, i)
            yield Tile(i, j, kind)
            for name in ("O", "m", "l"):
                yield Store(name, i)


def backward(visible: Visible, grid: Grid, first_of_group: bool = True) -> Iterator[Event]:
    """Gradients, column by column of tiles: dK and dV accumulate in SRAM, dQ in HBM.

    `first_of_group`: with grouped heads, the later heads of a group add to the dK and dV of the first.
    """
    seen: set[int] = set()
    start = Zero if first_of_group else Load
    for j in range(grid.shape[1]):
        yield Load("K", j)
        yield Load("V", j)
        yield start("dK", j)
        yield start("dV", j)
        for i, kind in grid.down(visible, j):
            for name in ("Q", "dO", "L", "D"):
                yield Load(name, i)
            yield Load("dQ", i) if i in seen else Zero("dQ", i)
            seen.add(i)
            yield Tile(i, j, kind)
            yield Store("dQ", i)
        yield Store("dK", j)
        yield Store("dV", j)
    for i in range(grid.shape[0]):
        if i not in seen:  # sees no key: its gradient is 0 and must still be written
            yield Zero("dQ", i)
            yield Store("dQ", i)


def standard_forward(grid: Grid) -> Iterator[Event]:
    """Standard attention: three kernels, with all of S and P in HBM between them. `grid` has one column of tiles.

    Every kernel moves each of its arrays once, the minimum.
    """
    for launch in STANDARD:
        yield launch
        for name in launch.reads:
            if name in KEY_ARRAYS:
                yield Load(name, 0)
        for i in range(grid.shape[0]):
            for name in launch.reads:
                if name not in KEY_ARRAYS:
                    yield Load(name, i)
            for name in launch.writes:
                yield Make(name, i)
                yield Store(name, i)


FORWARD: dict[str, Callable[[Visible, Grid], Iterator[Event]]] = {"fa1": fa1_forward, "fa2": fa2_forward}
