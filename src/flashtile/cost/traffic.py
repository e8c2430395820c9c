"""Elements, bytes, FLOPs and peak SRAM: a sum over the events of schedule.py, and the closed forms."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flashtile.band import Cuts, Kind, ceil_div, cuts
from flashtile.numerics.dtypes import ITEMSIZE, accumulator
from flashtile.numerics.schedule import Event, Grid, Launch, Load, Make, Store, Tile, Zero
from flashtile.numerics.visibility import Visibility, Visible

COLUMN_VECTORS = ("m", "l", "L", "D", "factor")  # one number per row
OF_WIDTH_V = ("V", "O", "dV", "dO")  # the others are as wide as q
IN_ACCUMULATOR = (*COLUMN_VECTORS, "dQ")  # dQ is accumulated in memory, so it stays unrounded there


@dataclass(frozen=True, slots=True)
class Layout:
    """The widths of the arrays of one head, and the type in which they travel."""

    dim: int
    dim_v: int
    dtype: str = "float32"

    def width(self, name: str) -> int:
        if name in COLUMN_VECTORS:
            return 1
        return self.dim_v if name in OF_WIDTH_V else self.dim

    def itemsize(self, name: str) -> int:
        return ITEMSIZE[accumulator(self.dtype) if name in IN_ACCUMULATOR else self.dtype]


@dataclass(slots=True)
class Traffic:
    """What one head moves and computes, and what is in SRAM now (counts are in elements, except *_bytes)."""

    grid: Grid
    layout: Layout
    loaded: int = 0
    stored: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    flops: int = 0  # as computed: a partial tile costs as much as a full one
    named_launches: int = 0  # kernels that the stream names
    tiles: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys((Kind.PARTIAL, Kind.FULL), 0))
    sram: dict[str, int] = field(default_factory=dict)
    peak_sram: int = 0

    @property
    def elements(self) -> int:
        """Elements moved through HBM, in both directions."""
        return self.loaded + self.stored

    @property
    def bytes(self) -> int:
        return self.loaded_bytes + self.stored_bytes

    @property
    def launches(self) -> int:
        """The number of kernels: a stream that names none is one."""
        return max(self.named_launches, 1)

    @property
    def sram_bytes(self) -> dict[str, int]:
        """The bytes of each array in SRAM."""
        return {name: n * self.layout.itemsize(name) for name, n in self.sram.items()}

    def see(self, event: Event) -> None:
        """Count one event."""
        match event:
            case Load(name, n):
                moved = self.sram[name] = self._size(name, n)
                self.loaded += moved
                self.loaded_bytes += moved * self.layout.itemsize(name)
            case Store(name, n):
                moved = self._size(name, n)
                self.stored += moved
                self.stored_bytes += moved * self.layout.itemsize(name)
            case Zero(name, n):
                # A block of O starts with its running maximum and sum.
                for part in ("O", "m", "l") if name == "O" else (name,):
                    self.sram[part] = self._size(part, n)
            case Tile(i, j, kind):
                self.tiles[kind] += 1
                self._compute(_length(self.grid.rows(i)), _length(self.grid.cols(j)))
            case Launch():
                self.named_launches += 1
                self.sram.clear()
            case Make(name, n):
                self.sram[name] = self._size(name, n)
                pairs = _length(self.grid.rows(n)) * self.grid.n_k
                self.flops += pairs * {"S": 2 * self.layout.dim, "P": 0, "O": 2 * self.layout.dim_v}[name]
        self.peak_sram = max(self.peak_sram, sum(self.sram.values()))

    def _compute(self, br: int, bc: int) -> None:
        d, dv = self.layout.dim, self.layout.dim_v
        if "dO" in self.sram:
            self.flops += br * bc * backward_flops_per_pair(d, dv)
            self.sram |= dict.fromkeys(("S", "P", "dP", "dS"), br * bc)
        else:
            self.flops += br * bc * forward_flops_per_pair(d, dv)
            self.sram |= {"S": br * bc, "P": br * bc, "factor": br}

    def _size(self, name: str, n: int) -> int:
        width = self.grid.n_k if name in ("S", "P") else self.layout.width(name)
        return _length(self.grid.block(name, n)) * width


def count(events: Iterable[Event], grid: Grid, layout: Layout) -> Traffic:
    """Count a stream of events."""
    traffic = Traffic(grid, layout)
    for event in events:
        traffic.see(event)
    return traffic


def forward_flops_per_pair(d: int, dv: int) -> int:
    """FLOPs of one query and one key: q.k, and the weight times v. A multiplication and an addition are two."""
    return 2 * d + 2 * dv


def backward_flops_per_pair(d: int, dv: int) -> int:
    """FLOPs of S, recomputed, dP, dV, dQ and dK: eq. 9 to 14."""
    return 6 * d + 4 * dv


def visible_pairs(visible: Visible, n_q: int, n_k: int) -> int:
    """The number of visible (query, key) pairs, without a loop over queries."""
    if isinstance(visible, Visibility):
        return visible.pairs(n_q, n_k)
    band = visible
    if band.left + band.right < 0:
        return 0

    def clipped_sum(start: int) -> int:
        """Sum over i of clip(start + i, 0, n_k)."""
        low, high = min(max(-start, 0), n_q), min(max(n_k - start, 0), n_q)
        rising = high - low  # the queries low..high-1 count up from start + low
        return rising * (start + low) + rising * (rising - 1) // 2 + (n_q - high) * n_k

    return clipped_sum(band.end(0)) - clipped_sum(band.begin(0))


# Closed forms: elements moved per head, forward, d = dv.


def standard_elements(n: int, d: int, n_k: int | None = None, dv: int | None = None) -> int:
    """S written and read, P written and read; Q, K, V and O once. As many keys as queries unless n_k is given."""
    n_k, dv = n if n_k is None else n_k, d if dv is None else dv
    return 4 * n * n_k + (n + n_k) * (d + dv)


def fa1_block(sram: int, d: int) -> int:
    """Columns of a tile so that four blocks fit an SRAM of this many elements."""
    return ceil_div(sram, 4 * d)


def fa1_elements(n: int, d: int, bc: int) -> int:
    """K and V once; for each column of tiles Q once, and O, m and l both ways: Theta(n^2 d^2 / sram)."""
    return 2 * n * d + ceil_div(n, bc) * (3 * n * d + 4 * n)


def fa1_visible_elements(n_q: int, n_k: int, d: int, dv: int, br: int, bc: int, visible: Visible) -> int:
    """The same for any band or spans: only columns with a tile to compute, and only the rows of those tiles."""
    columns = columns_visited(visible, n_q, n_k, br, bc)
    return sum((d + dv) * keys + (d + 2 * dv + 4) * _rows_in(tiles, n_q, br) for keys, tiles in columns if tiles)


def fa2_elements(n_q: int, n_k: int, d: int, dv: int, br: int, bc: int, visible: Visible) -> int:
    """Q, O and L once; for each row of tiles its visible keys and values."""
    return n_q * (d + dv + 1) + (d + dv) * keys_visited(visible, n_q, n_k, br, bc)


def backward_elements(n_q: int, n_k: int, d: int, dv: int, br: int, bc: int, visible: Visible) -> int:
    """K, V, dK and dV once; a column of tiles moves Q, dO, L, D and dQ of its rows, dQ both ways.

    dQ is not read the first time, and the 0 of a row that sees no key is still written.
    """
    columns = [tiles for _, tiles in columns_visited(visible, n_q, n_k, br, bc) if tiles]
    moved = sum(_rows_in(tiles, n_q, br) for tiles in columns)
    rows = range(min(t[0] for t in columns), max(t[-1] for t in columns) + 1) if columns else range(0)  # by a band
    seen = _rows_in(sorted(set().union(*columns)) if isinstance(visible, Visibility) else rows, n_q, br)
    return 2 * n_k * (d + dv) + moved * (3 * d + dv + 2) - seen * d + (n_q - seen) * d


def least_elements(n: int, d: int) -> int:
    """Q, K, V, O and L once: the minimum for every order of tiles."""
    return 4 * n * d + n


def rows_of(visible: Visible, n_q: int, n_k: int, br: int, bc: int) -> Iterator[tuple[Cuts, ...]]:
    """The cuts of each row of tiles: one, or one for each span."""
    if isinstance(visible, Visibility):
        return iter(visible.rows(n_q, n_k, br, bc))
    return ((cuts(visible, first, min(first + br, n_q), n_k, bc),) for first in range(0, n_q, br))


def keys_visited(visible: Visible, n_q: int, n_k: int, br: int, bc: int) -> int:
    """The keys loaded, summed over the rows of tiles."""
    rows = rows_of(visible, n_q, n_k, br, bc)
    return sum(max(min(c.end * bc, n_k) - c.begin * bc, 0) for row in rows for c in row)


def keys_seen(visible: Visible, n_q: int, n_k: int) -> int:
    """The number of keys that some query sees."""
    if isinstance(visible, Visibility):
        return int((visible.keys(n_q, n_k) > 0).sum())
    if not n_q:
        return 0
    c = cuts(visible, 0, n_q, n_k, 1)
    return c.end - c.begin


def columns_visited(visible: Visible, n_q: int, n_k: int, br: int, bc: int) -> list[tuple[int, Sequence[int]]]:
    """For each column of tiles, its number of keys, and the rows of its tiles to compute."""
    keys = [min(bc, n_k - first) for first in range(0, n_k, bc)]
    rows: list[Sequence[int]]
    if isinstance(visible, Visibility):
        rows = [[i for i, _ in column] for column in visible.columns(n_q, n_k, br, bc)]
    else:
        bands = (cuts(visible.T, first, min(first + bc, n_k), n_q, br) for first in range(0, n_k, bc))
        rows = [range(c.begin, c.end) for c in bands]
    return list(zip(keys, rows, strict=True))


def _rows_in(tiles: Sequence[int], n_q: int, br: int) -> int:
    """Rows of scores in these rows of tiles, the last of which may be ragged."""
    return min(len(tiles) * br, n_q - (tiles[-1] + 1 - len(tiles)) * br) if tiles else 0


def tile_counts(visible: Visible, n_q: int, n_k: int, br: int, bc: int) -> dict[Kind, int]:
    """The number of skipped, partial and full tiles, in one step per row of tiles."""
    counts = dict.fromkeys(Kind, 0)
    across = ceil_div(n_k, bc)
    for row in rows_of(visible, n_q, n_k, br, bc):
        computed, full = sum(c.end - c.begin for c in row), sum(c.full_end - c.full_begin for c in row)
        counts[Kind.SKIPPED] += across - computed
        counts[Kind.FULL] += full
        counts[Kind.PARTIAL] += computed - full
    return counts


def _length(s: slice) -> int:
    return int(s.stop) - int(s.start)
