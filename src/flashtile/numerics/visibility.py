"""Visibility: the pairs that the band and the spans of a head make visible, and how they cut rows of tiles."""

from itertools import chain
from typing import Any

import numpy as np

from flashtile.band import Band, Cuts, Kind, ceil_div
from flashtile.spans import within

RowCuts = list[tuple[Cuts, ...]]
ColumnTiles = list[list[tuple[int, Kind]]]


class Visibility:
    """The pairs of one head that the band and the spans make visible. limits: (queries or 1, spans, 2)."""

    __slots__ = ("_cached", "band", "limits")

    def __init__(self, band: Band, limits: Any) -> None:
        self.band, self.limits = band, limits
        self._cached: dict[tuple[int, ...], tuple[RowCuts, ColumnTiles]] = {}

    def keep(self, i: Any, j: Any) -> Any:
        """True where query i may see key j: arrays of shape (rows, 1) and (1, columns)."""
        limits = self.limits if len(self.limits) == 1 else self.limits[i[:, 0]]
        return self.band.keep(i, j) & within(limits[:, None], np.asarray(j)[..., None])

    def ends(self, n_q: int, n_k: int) -> tuple[Any, Any]:
        """Begin and end of what each query sees, (queries, spans), by band, spans and number of keys; begin may be
        past the end.
        """
        i: Any = np.arange(n_q)[:, None]
        begin = np.maximum(np.maximum(self.band.begin(i), 0), self.limits[..., 0])
        return begin, np.minimum(np.minimum(self.band.end(i), n_k), self.limits[..., 1])

    def pairs(self, n_q: int, n_k: int) -> int:
        """The number of visible pairs."""
        begin, end = self.ends(n_q, n_k)
        return int(np.maximum(end - begin, 0).sum())

    def keys(self, n_q: int, n_k: int) -> Any:
        """How many queries see each key: (n_k,)."""
        begin, end = self.ends(n_q, n_k)
        seen = begin < end
        steps = np.zeros(n_k + 1, np.int64)
        np.add.at(steps, begin[seen], 1)
        np.add.at(steps, end[seen], -1)
        return np.cumsum(steps[:-1])

    def rows(self, n_q: int, n_k: int, br: int, bc: int) -> RowCuts:
        """The cuts of each row of tiles, one for each span, in order."""
        return self._tiles(n_q, n_k, br, bc)[0]

    def columns(self, n_q: int, n_k: int, br: int, bc: int) -> ColumnTiles:
        """For each column of tiles, the rows whose cuts visit it, with the kind of tile."""
        return self._tiles(n_q, n_k, br, bc)[1]

    def _tiles(self, *grid: int) -> tuple[RowCuts, ColumnTiles]:
        if grid not in self._cached:
            rows = self._row_cuts(*grid)
            columns: ColumnTiles = [[] for _ in range(ceil_div(grid[1], grid[3]))]
            for i, row in enumerate(rows):
                for j, kind in chain(*row):
                    columns[j].append((i, kind))
            self._cached = {grid: (rows, columns)}  # of the last grid only
        return self._cached[grid]

    def _row_cuts(self, n_q: int, n_k: int, br: int, bc: int) -> RowCuts:
        first = np.arange(0, n_q, br)
        if not len(first):
            return []
        begin, end = self.ends(n_q, n_k)
        counts = begin < end
        least_begin = np.minimum.reduceat(np.where(counts, begin, n_k), first)
        least_end = np.minimum.reduceat(np.where(counts, end, 0), first)  # 0 if a row sees nothing: no tile is full
        most_begin = np.maximum.reduceat(np.where(counts, begin, 0), first)
        most_end = np.maximum.reduceat(np.where(counts, end, 0), first)
        # A span that some rows lack may lie before one that they have: ranges begin where a later one does, if that is
        # earlier, so that each begins behind the one before it.
        least_begin = np.minimum.accumulate(least_begin[:, ::-1], axis=1)[:, ::-1]
        found, past = [], np.zeros(len(first), np.int64)
        for r in range(begin.shape[1]):
            some = most_end[:, r] > 0
            start = np.maximum(np.where(some, least_begin[:, r] // bc, 0), past)
            stop = np.maximum(-(-most_end[:, r] // bc), start)
            full = np.clip(-(-most_begin[:, r] // bc), start, stop)
            full_stop = np.clip(least_end[:, r] // bc, full, stop)
            found.append(np.where(some[:, None], np.stack([start, full, full_stop, stop], 1), past[:, None]).tolist())
            past = np.where(some, stop, past)
        return [tuple(Cuts(*c) for c in row) for row in zip(*found, strict=True)]


Visible = Band | Visibility  # of one head; Visibility if there are spans
