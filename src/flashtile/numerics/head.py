"""Head: one head of one sequence as a 2-D problem, and the order of operations on its scores."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtile.band import Band
from flashtile.numerics import dropout
from flashtile.numerics.dtypes import Array, widen
from flashtile.numerics.visibility import Visible
from flashtile.problem import Problem


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one tile, the derivative of softcap, and which pairs are visible."""

    S: Array  # [br, bc], -inf where masked
    slope: Array | None  # d S / d (scale q.k); None without softcap
    visible: Array | None  # None: all are visible


@dataclass(frozen=True, slots=True)
class Head:
    """Views of one query head, its key head, and everything that its scores depend on."""

    problem: Problem
    sequence: int
    head: int
    q_rows: slice  # the sequence's rows of problem.q
    k_rows: slice  # the sequence's keys in use, rows of problem.k
    band: Band
    visible_by: Visible  # the band, with the spans if there are any

    @property
    def n_q(self) -> int:
        return int(self.q_rows.stop - self.q_rows.start)

    @property
    def n_k(self) -> int:
        return int(self.k_rows.stop - self.k_rows.start)

    @property
    def kv_head(self) -> int:
        return self.head // self.problem.group

    @property
    def first_of_group(self) -> bool:
        return self.head % self.problem.group == 0

    def queries(self, x: Array) -> Array:
        """The rows of this head in an array with the layout of q, out or lse."""
        return x[self._batch, self.head, self.q_rows]

    def keys(self, x: Array) -> Array:
        """The rows of this head's key head in an array with the layout of k or v."""
        return x[self._batch, self.kv_head, self.k_rows]

    @property
    def _batch(self) -> int:
        return 0 if self.problem.packed else self.sequence

    @property
    def sink(self) -> float | None:
        sink = self.problem.sink
        return None if sink is None else float(widen(sink[self.head : self.head + 1], np.float64)[0])

    def pairs(self, x: Array, rows: Any, cols: slice) -> Array:
        """A tile of this head's mask or bias: [br, bc], with length 1 along axes that are broadcast."""
        plane: Array = x[self.sequence if x.shape[0] > 1 else 0, self.head if x.shape[1] > 1 else 0]
        return plane[rows if plane.shape[0] > 1 else slice(None), cols if plane.shape[1] > 1 else slice(None)]

    def add_pairs(self, total: Array, dS: Array, rows: slice, cols: slice) -> None:
        """Add a tile of dS to the gradient of a bias, summed over the axes that were broadcast."""
        for axis in (0, 1):
            if total.shape[2 + axis] == 1:
                dS = dS.sum(axis=axis, keepdims=True)
        self.pairs(total, rows, cols)[...] += dS

    def scores(self, Q: Array, K: Array, rows: Any, cols: slice, masked: bool) -> Scores:
        """Compute the input of softmax for a tile: q.k, then scale, softcap, bias, ALiBi and mask.

        `rows` indexes the queries (a slice or an index array). `masked`: band or spans may cut the tile.
        """
        p, dtype = self.problem, Q.dtype
        S = (Q @ K.T) * dtype.type(p.scale)
        slope = None
        if p.softcap:
            tanh = np.tanh(S / dtype.type(p.softcap))
            S, slope = tanh * dtype.type(p.softcap), 1 - tanh * tanh
        if p.bias is not None:
            S = S + widen(self.pairs(p.bias, rows, cols), dtype)
        i, j = self._positions(rows, cols)
        if p.alibi is not None:
            row = p.alibi[self.sequence if len(p.alibi) > 1 else 0]
            weight = widen(row[self.head : self.head + 1], dtype)[0]
            S = S - weight * np.abs(i + self.band.offset - j).astype(dtype)
        visible = self.visible(rows, cols, masked)
        if visible is not None:
            S = np.where(visible, S, dtype.type(-np.inf))
            slope = None if slope is None else np.where(visible, slope, dtype.type(0))
        return Scores(S, slope, visible)

    def visible(self, rows: Any, cols: slice, masked: bool) -> Array | None:
        """Which pairs of a tile are visible; None: all are."""
        i, j = self._positions(rows, cols)
        visible = self.visible_by.keep(i, j) if masked else None
        if self.problem.mask is not None:
            given = self.pairs(self.problem.mask, rows, cols)
            visible = np.broadcast_to(given, (i.size, j.size)) if visible is None else visible & given
        return visible

    def kept(self, rows: Any, cols: slice, dtype: Any) -> Array | None:
        """The factors of dropout for a tile's weights: 0 or 1 / (1 - dropout); None without dropout."""
        p = self.problem
        if not p.dropout:
            return None
        at, (i, j) = p.origin, self._positions(rows, cols)
        head = (at.sequence + self.sequence) * at.heads + at.head + self.head
        bits = dropout.keep(p.seed, head, at.query + i * at.query_step, at.key + j * at.key_step, p.dropout)
        kept: Array = bits * np.asarray(1 / (1 - p.dropout), dtype)
        return kept

    def _positions(self, rows: Any, cols: slice) -> tuple[Array, Array]:
        i = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return i[:, None], np.arange(cols.start, cols.stop)[None, :]


def heads(problem: Problem) -> Iterator[Head]:
    """Yield every head of every sequence; the heads of a group are consecutive."""
    q_lengths, k_lengths = problem.q_lengths, problem.k_lengths
    q_starts = problem.cu_q if problem.packed else [0] * problem.sequences
    k_starts = problem.cu_k if problem.packed else [0] * problem.sequences
    for s in range(problem.sequences):
        q_rows = slice(int(q_starts[s]), int(q_starts[s]) + q_lengths[s])
        k_rows = slice(int(k_starts[s]), int(k_starts[s]) + k_lengths[s])
        band = problem.band_for(q_lengths[s], k_lengths[s])
        for h in range(problem.heads):
            yield Head(problem, s, h, q_rows, k_rows, band, problem.visible(band, s, h, q_lengths[s]))


def guarded_product(A: Array, B: Array, visible: Array | None) -> Array:
    """Return A @ B, where a masked pair contributes nothing, not even 0 * NaN.

    A is [r, c] with 0 where masked, B is [c, d]. If B is finite this is the ordinary product.
    """
    bad = [] if visible is None else np.flatnonzero(~np.isfinite(B).all(axis=1)).tolist()
    clean = B
    if bad:
        clean = B.copy()
        clean[bad] = 0
    product: Array = A @ clean
    for c in bad:
        seen = visible[:, c]  # type: ignore[index]
        product[seen] += A[seen, c, None] * B[c]
    return product
