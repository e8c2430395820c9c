"""Spans: which keys each query sees, as a few intervals per query; and how band and spans cut rows of tiles."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import numpy as np

from flashtile.band import Band, Cuts, Kind, ceil_div
from flashtile.errors import DTypeError, ShapeError

MAX_SPANS = 8  # of a query
FARTHEST = 2**31 - 1  # limits are int32


class Spans:
    """Query i sees the keys begin[i] <= j < end[i]; with a last axis of up to 8, several disjoint, rising spans.

    begin and end are integers, or integer arrays or tensors that broadcast to (batch, heads, queries), or to
    (batch, heads, queries, spans). For packed sequences the first axis counts sequences, and queries and keys count
    within a sequence. A span may be empty, and may end beyond the last key.

    `limits` has both as one int32 array, (batch or 1, heads or 1, queries or 1, spans, 2). They never fall along the
    last two axes: begin, end, next begin, next end. An empty span begins and ends where the one before it ends.
    """

    __slots__ = ("limits",)
    limits: Any

    def __init__(self, begin: Any, end: Any) -> None:
        begin, end = _as_integers(begin, end)
        xp = _library(begin)
        rank = max(begin.ndim, end.ndim)
        if rank > 4 or (rank == 4 and not {begin.ndim, end.ndim} <= {0, 4}):
            shapes = f"{tuple(begin.shape)} and {tuple(end.shape)}"
            raise ShapeError(
                f"spans: expected begin and end of up to (batch, heads, queries), or both of "
                f"(batch, heads, queries, spans), got {shapes}"
            )
        try:
            begin, end = xp.broadcast_arrays(begin, end) if xp is np else xp.broadcast_tensors(begin, end)
        except (ValueError, RuntimeError):
            shapes = f"{tuple(begin.shape)} and {tuple(end.shape)}"
            raise ShapeError(f"spans: expected begin and end that broadcast together, got {shapes}") from None
        if rank < 4:
            begin, end = begin[..., None], end[..., None]
        begin, end = (x[(None,) * (4 - x.ndim)] for x in (begin, end))
        if not 1 <= begin.shape[-1] <= MAX_SPANS:
            raise ShapeError(f"spans: expected 1 to {MAX_SPANS} spans per query, got {begin.shape[-1]}")
        self.limits = _rising(xp, begin, end)

    @classmethod
    def of(cls, limits: Any) -> Spans:
        """Return the Spans with these limits, which must be as described above."""
        spans = cls.__new__(cls)
        spans.limits = limits
        return spans

    @property
    def begin(self) -> Any:
        """(batch or 1, heads or 1, queries or 1, spans)."""
        return self.limits[..., 0]

    @property
    def end(self) -> Any:
        return self.limits[..., 1]

    def __repr__(self) -> str:
        return f"Spans({self.begin!r}, {self.end!r})"

    def to_mask(self, n_k: int) -> Any:
        """Return the boolean mask, (batch or 1, heads or 1, queries or 1, n_k): for tests and pictures."""
        xp = _library(self.limits)
        keys = np.arange(n_k) if xp is np else xp.arange(n_k, device=self.limits.device)
        return _within(self.limits[..., None, :, :], keys[:, None])


def limits_of(spans: Any) -> Any:
    """Return the limits of a Spans; None for None."""
    if spans is None:
        return None
    if not isinstance(spans, Spans):
        raise DTypeError(f"spans: expected a flashtile.Spans, got {type(spans).__name__}")
    return spans.limits


def _as_integers(begin: Any, end: Any) -> tuple[Any, Any]:
    """Return begin and end as arrays of one library, and of 64-bit integers."""
    tensor = next((x for x in (begin, end) if hasattr(x, "__torch_function__")), None)
    found = []
    for name, x in (("begin", begin), ("end", end)):
        if tensor is None:
            x = np.asarray(x)
            integers = x.dtype.kind in "iu"
        else:
            import torch

            if not isinstance(x, torch.Tensor):
                if isinstance(x, np.ndarray) and x.ndim:
                    raise DTypeError(f"spans: expected begin and end of one library, got a NumPy array for {name}")
                x = torch.as_tensor(x, device=tensor.device)
            if x.device != tensor.device:
                raise DTypeError(f"spans: expected begin and end on one device, got {tensor.device} and {x.device}")
            integers = not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
        if not integers:
            raise DTypeError(f"spans: expected integers, got {name} of {x.dtype}")
        if tensor is None:
            x = np.minimum(x, FARTHEST).astype(np.int64) if x.dtype.kind == "u" else x.astype(np.int64, copy=False)
        else:
            x = x.to(torch.int64)
        found.append(x)
    return found[0], found[1]


def _rising(xp: Any, begin: Any, end: Any) -> Any:
    """Return limits that never fall; raise an error for spans that overlap or fall, where values can be read."""
    begin, end = begin.clip(0, FARTHEST), end.clip(0, FARTHEST)
    last, found, ok = begin[..., 0] * 0, [], None
    for r in range(begin.shape[-1]):
        b, e = begin[..., r], end[..., r]
        seen = b < e
        if r:
            rises = ~seen | (b >= last)
            ok = rises if ok is None else ok & rises
        b, e = xp.maximum(b, last), xp.maximum(e, last)
        b, e = xp.where(seen, b, last), xp.where(seen, e, last)
        found += [b, e]
        last = e
    if ok is not None and _is_readable(xp, ok) and not bool(ok.all()):
        at = tuple(np.argwhere(~np.asarray(ok))[0].tolist())
        pairs = [(int(b), int(e)) for b, e in zip(begin[at].tolist(), end[at].tolist(), strict=True)]
        raise ShapeError(f"spans: expected disjoint spans in rising order, got {pairs} for (batch, head, query) {at}")
    limits = xp.stack(found, -1)
    limits = limits.astype(np.int32) if xp is np else limits.to(xp.int32)
    limits = limits.reshape(*begin.shape, 2)
    if xp is np:
        limits.flags.writeable = False
    return limits


def _library(x: Any) -> Any:
    """NumPy or torch."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def _is_readable(xp: Any, x: Any) -> bool:
    """Whether values can be read now, without waiting for a device."""
    if xp is np:
        return True
    from flashtile.pytorch.interception import readable

    return not xp.compiler.is_compiling() and readable(x)


def _within(limits: Any, keys: Any) -> Any:
    """Whether keys (..., 1) are in any span of limits (..., spans, 2)."""
    return ((limits[..., 0] <= keys) & (keys < limits[..., 1])).any(-1)


class Visibility:
    """The pairs of one head that the band and the spans make visible. limits: (queries or 1, spans, 2)."""

    __slots__ = ("_cached", "band", "limits")

    def __init__(self, band: Band, limits: Any) -> None:
        self.band, self.limits = band, limits
        self._cached: tuple[Any, Any, Any] = (None, None, None)

    def keep(self, i: Any, j: Any) -> Any:
        """True where query i may see key j: arrays of shape (rows, 1) and (1, columns)."""
        limits = self.limits if len(self.limits) == 1 else self.limits[i[:, 0]]
        return self.band.keep(i, j) & _within(limits[:, None], np.asarray(j)[..., None])

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

    def rows(self, n_q: int, n_k: int, br: int, bc: int) -> list[tuple[Cuts, ...]]:
        """The cuts of each row of tiles, one for each span, in order."""
        found: list[tuple[Cuts, ...]] = self._tiles(n_q, n_k, br, bc)[0]
        return found

    def columns(self, n_q: int, n_k: int, br: int, bc: int) -> list[list[tuple[int, Kind]]]:
        """For each column of tiles, the rows whose cuts visit it, with the kind of tile."""
        found: list[list[tuple[int, Kind]]] = self._tiles(n_q, n_k, br, bc)[1]
        return found

    def _tiles(self, *grid: int) -> tuple[Any, Any]:
        if self._cached[0] != grid:
            rows = self._row_cuts(*grid)
            columns: list[list[tuple[int, Kind]]] = [[] for _ in range(ceil_div(grid[1], grid[3]))]
            for i, row in enumerate(rows):
                for j, kind in chain(*row):
                    columns[j].append((i, kind))
            self._cached = grid, rows, columns
        return self._cached[1:]

    def _row_cuts(self, n_q: int, n_k: int, br: int, bc: int) -> list[tuple[Cuts, ...]]:
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
