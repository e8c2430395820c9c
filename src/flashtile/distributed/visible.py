"""Visible: which tokens each token of the whole sequence sees, as intervals: band, documents, spans and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtile.band import Band
from flashtile.numerics.dtypes import Array


@dataclass(frozen=True, eq=False)
class Visible:
    """The pairs of a whole sequence that may be seen. Queries and keys count over the whole row of tokens."""

    tokens: int
    starts: Array  # where documents start, and the end of the last one
    band: Band | None = None
    align_end: bool = False  # the last query stands at the last key in use
    limits: Any = None  # of Spans: (batch or 1, heads or 1, tokens or 1, spans, 2)
    kv_lengths: Any = None  # (batch,): keys in use
    first: int = 0  # the token of the first query, from which limits and a band count

    def ends(self, rows: Array) -> tuple[Array, Array]:
        """Begin and end of what each of these rows sees: (batch or 1, heads or 1, rows, spans)."""
        document = np.searchsorted(self.starts, rows, "right") - 1
        begin, end = (x[document][None, None, :, None] for x in (self.starts[:-1], self.starts[1:]))
        if self.kv_lengths is not None:
            end = np.minimum(end, np.asarray(self.kv_lengths, np.int64)[:, None, None, None])
        if self.band is not None:
            at = rows[None, None, :, None] + self.offset
            begin = np.maximum(begin, at - self.band.left)
            end = np.minimum(end, at + self.band.right + 1)
        if self.limits is not None:
            limits = self.limits if self.limits.shape[2] == 1 else self.limits[:, :, rows - self.first]
            begin, end = np.maximum(begin, limits[..., 0]), np.minimum(end, limits[..., 1])
        begin, end = np.broadcast_arrays(begin, np.maximum(begin, end))
        return begin, end

    @property
    def offset(self) -> Any:
        """How far after its own index a query stands among the keys: a number, or (batch, 1, 1, 1)."""
        if self.align_end and self.kv_lengths is not None:
            return np.asarray(self.kv_lengths, np.int64)[:, None, None, None] - self.tokens
        return 0 if self.align_end or self.band is None else self.band.offset - self.first

    def counts(self) -> Array:
        """How many keys each token sees, on average over the batch and the heads."""
        found = [
            np.subtract(*reversed(self.ends(rows))).sum(-1).mean((0, 1))
            for rows in np.array_split(np.arange(self.tokens), max(self.tokens >> 20, 1))
        ]
        counts: Array = np.concatenate(found)
        return counts


def union(begin: Array, end: Array, most: int = 64) -> list[tuple[int, int]]:
    """The union of intervals as disjoint rising ones: at most `most`, for which the narrowest gaps are filled."""
    some = begin < end
    begin, end = begin[some], end[some]
    if not len(begin):
        return []
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    gaps = begin[1:] - end[:-1]
    wide = np.flatnonzero(gaps > 0)
    if len(wide) >= most:
        wide = np.sort(wide[np.argsort(-gaps[wide], kind="stable")[: most - 1]])
    firsts, lasts = np.r_[0, wide + 1], np.r_[wide, len(begin) - 1]
    return list(zip(begin[firsts].tolist(), end[lasts].tolist(), strict=True))


def starts_of(lengths: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)
