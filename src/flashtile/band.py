"""Band: which keys a query may see; cuts(): how a band divides a row of tiles into skipped, partial and full ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

FAR = 1 << 40  # "no limit": longer than any sequence, and a sum of a few still fits into 64 bits


class Kind(Enum):
    """How a tile of the score matrix is computed: not at all, with a mask, or without."""

    SKIPPED = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class Band:
    """Query i may see key j iff -left <= j - (i + offset) <= right."""

    left: int = FAR
    right: int = FAR
    offset: int = 0

    @property
    def T(self) -> Band:
        """The same band with the roles of query and key swapped."""
        return Band(self.right, self.left, -self.offset)

    def shifted(self, by: int) -> Band:
        return Band(self.left, self.right, self.offset + by)

    def begin(self, i: int) -> int:
        """The first key that query i may see; it may be negative."""
        return i + self.offset - self.left

    def end(self, i: int) -> int:
        """One past the last key that query i may see."""
        return i + self.offset + self.right + 1

    def keep(self, i: Any, j: Any) -> Any:
        """True where query i may see key j; i and j may be arrays."""
        distance = j - i - self.offset
        return (-self.left <= distance) & (distance <= self.right)


def full() -> Band:
    """Every query sees every key."""
    return Band()


def causal() -> Band:
    """Query i sees keys up to i. attention(causal=True) aligns the last query with the last key instead, which is
    another band unless there are as many keys as queries.
    """
    return Band(right=0)


def window(left: int | None = None, right: int | None = None) -> Band:
    """Query i sees `left` keys before it, itself, and `right` keys after it; None is no limit."""
    return Band(FAR if left is None else left, FAR if right is None else right)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Tiles of one row: [begin, full_begin) partial, [full_begin, full_end) full, [full_end, end) partial."""

    begin: int
    full_begin: int
    full_end: int
    end: int

    def __iter__(self) -> Iterator[tuple[int, Kind]]:
        """The tiles to compute, in order, with the kind of each."""
        for j in range(self.begin, self.end):
            yield j, Kind.FULL if self.full_begin <= j < self.full_end else Kind.PARTIAL


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def cuts(band: Band, first: int, last: int, n_cols: int, block: int) -> Cuts:
    """How the band cuts the row of tiles of rows first..last-1; a ragged last tile is partial."""

    def clip(x: int, low: int, high: int) -> int:
        return min(max(x, low), high)

    if band.left + band.right < 0:  # an empty band: no row sees a key
        return Cuts(0, 0, 0, 0)
    n = ceil_div(n_cols, block)
    # Some row sees begin(first)..end(last - 1); all rows see begin(last - 1)..end(first).
    begin = clip(band.begin(first) // block, 0, n)
    end = clip(ceil_div(min(band.end(last - 1), n_cols), block), begin, n)
    full_begin = clip(ceil_div(band.begin(last - 1), block), begin, end)
    full_end = clip(min(band.end(first), n_cols) // block, full_begin, end)
    return Cuts(begin, full_begin, full_end, end)
