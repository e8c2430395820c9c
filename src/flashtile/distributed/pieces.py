"""Pieces: calls of attention that together compute what some queries see of some keys, each pair once."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from flashtile.band import FAR, Band
from flashtile.distributed.segments import Segment, Segments, offsets, tokens
from flashtile.distributed.visible import Visible
from flashtile.numerics.dtypes import Array
from flashtile.spans import MAX_SPANS

MOST_BANDS = 4  # pieces with bands in place of one with spans
EVERY = slice(None)


class Piece(NamedTuple):
    """One call: rows of queries and of keys, and which of these pairs are visible."""

    queries: slice
    keys: slice
    band: Band | None = None
    limits: Array | None = None  # of Spans
    batch: slice = EVERY
    # The first tokens and the steps of both, if their rows are evenly spaced: for dropout, masks and ALiBi.
    query: Segment | None = None
    key: Segment | None = None
    slope: int = 1  # ALiBi: what slopes are multiplied by
    far: int = 0  # ALiBi: by how many tokens pairs are farther apart than the call says


class Uses(NamedTuple):
    """What a call depends on beyond visibility."""

    tokens: bool  # on the tokens of rows: dropout, masks and biases of all pairs
    distance: bool  # on distances of tokens: ALiBi


class _Rows(NamedTuple):
    """Evenly spaced rows of a tensor that hold a segment."""

    rows: slice
    segment: Segment


def pieces(visible: Visible, queries: Segments, keys: Segments, uses: Uses) -> list[Piece]:
    """The pieces for queries and keys of these segments; none for pairs that nobody sees."""
    if not queries or not keys:
        return []
    begin, end = visible.ends(tokens(queries))
    if not uses.distance:
        return _of_rows(begin, end, queries, keys, uses.tokens)
    found = []
    offset = np.asarray(visible.offset).reshape(-1)
    batches = [slice(b, b + 1) for b in range(len(offset))] if (offset != offset[0]).any() else [slice(None)]
    for n, batch in enumerate(batches):
        here = batch if len(begin) > 1 else slice(None)
        for q, k in _pairs(queries, keys, True):
            ends = (begin[here, :, q.rows], end[here, :, q.rows])
            found += _by_distance(*ends, q, k, int(offset[n]), batch)
    return found


def _of_rows(begin: Array, end: Array, queries: Segments, keys: Segments, apart: bool) -> list[Piece]:
    """Pieces of all rows, or, apart, for each pair of segments."""
    if apart:
        found = []
        for q, k in _pairs(queries, keys, False):
            b, e = _local(begin[:, :, q.rows], end[:, :, q.rows], (k.segment,))
            found += _placed(_few(b, e, FAR), q, k)
        return found
    pieces = _by_bands(begin, end, queries, keys)
    return _by_spans(begin, end, queries, keys) if pieces is None else pieces


def _pairs(queries: Segments, keys: Segments, equal_steps: bool) -> Iterator[tuple[_Rows, _Rows]]:
    """The pairs of segments; with equal steps if need be, for which segments are dealt out."""
    for q, q0 in zip(queries, offsets(queries), strict=True):
        for k, k0 in zip(keys, offsets(keys), strict=True):
            steps = [s.step for s in (q, k) if s.n > 1]
            step = lcm(*steps) if equal_steps and steps else 0
            for a in _dealt(q, q0, step):
                for b in _dealt(k, k0, step):
                    yield a, b


def _dealt(segment: Segment, offset: int, step: int) -> Iterator[_Rows]:
    """The rows of a segment; with a step, those that are so far apart."""
    if segment.n == 1 and step:
        segment = segment._replace(step=step)
    stride = step // segment.step if step else 1
    for first in range(min(stride, segment.n)):
        yield _Rows(slice(offset + first, offset + segment.n, stride), segment.part(first, segment.n, stride))


def _by_distance(begin: Array, end: Array, q: _Rows, k: _Rows, offset: int, batch: slice) -> list[Piece]:
    """Pieces of a pair of segments with one step. Distances in tokens are step * those in rows, plus a constant: one
    for keys before a query and another for keys after it, unless both segments hold the same tokens modulo the step.
    """
    step = q.segment.step
    rows, rest = divmod(q.segment.start + offset - k.segment.start, step)
    begin, end = _local(begin, end, (k.segment,))
    if not rest:
        return _placed(_few(begin, end, FAR), q, k, (rows, step, 0), batch)
    middle = (np.arange(q.segment.n) + rows + 1)[None, None, :, None]
    before = _few(begin, np.minimum(end, middle), FAR)
    after = _few(np.maximum(begin, middle), end, FAR)
    found = _placed(before, q, k, (rows, step, rest), batch)
    return found + _placed(after, q, k, (rows + 1, step, step - rest), batch)


def _placed(
    ends: tuple[Array, Array],
    q: _Rows,
    k: _Rows,
    distance: tuple[int, int, int] | None = None,
    batch: slice = EVERY,
) -> list[Piece]:
    """One piece of a pair of segments, with a band if possible, or none."""
    trimmed = _trim(*ends)
    if trimmed is None:
        return []
    (q0, q1), (k0, k1), begin, end = trimmed
    found = _band(begin, end, k1 - k0)
    band, limits, slope, far = found, None, 1, 0
    if distance is not None:
        rows, slope, far = distance
        at = rows + q0 - k0
        band = Band(FAR, FAR, at)
        if found is not None:
            left = FAR if found.left == FAR else at - (found.offset - found.left)
            right = FAR if found.right == FAR else found.offset + found.right - at
            band = Band(left, right, at)
    if found is None:
        limits = np.stack([begin, end], -1).astype(np.int32)
    return [
        Piece(
            _part(q.rows, q0, q1),
            _part(k.rows, k0, k1),
            None if found == Band() and distance is None else band,
            limits,
            batch,
            q.segment.part(q0, q1),
            k.segment.part(k0, k1),
            slope,
            far,
        )
    ]


def _part(rows: slice, first: int, stop: int) -> slice:
    step = rows.step or 1
    return slice(rows.start + first * step, rows.start + (stop - 1) * step + 1, step)


def _by_bands(begin: Array, end: Array, queries: Segments, keys: Segments) -> list[Piece] | None:
    """One piece with a band, or one for each query segment, or for each pair of segments; None if that does not do."""
    if begin.shape[:2] != (1, 1) or begin.shape[3] > 1:
        return None
    every_query, every_key = (_Rows(slice(0, sum(s.n for s in x)), Segment(0, 1, 0)) for x in (queries, keys))
    q_rows = [_Rows(slice(at, at + s.n), s) for s, at in zip(queries, offsets(queries), strict=True)]
    k_rows = [_Rows(slice(at, at + s.n), s) for s, at in zip(keys, offsets(keys), strict=True)]
    for some_queries, some_keys in (
        ([every_query], [(every_key, keys)]),
        (q_rows, [(every_key, keys)]),
        (q_rows, [(k, (k.segment,)) for k in k_rows]),
    ):
        found: list[Piece] | None = []
        if len(some_queries) * len(some_keys) > 4 * MOST_BANDS:
            continue
        for q in some_queries:
            for k, segments in some_keys:
                ends = _few(*_local(begin[:, :, q.rows], end[:, :, q.rows], segments), FAR)
                more = _placed(ends, q, k)
                if found is None or any(x.limits is not None for x in more):
                    found = None
                    break
                found += more
        if found is not None and len(found) <= MOST_BANDS:
            return found
    return None


def _by_spans(begin: Array, end: Array, queries: Segments, keys: Segments) -> list[Piece]:
    """One piece with spans, or as many as it takes for each query to have no more than 8 in a piece."""
    ends = _few(*_local(begin, end, keys), MAX_SPANS)
    if ends is not None:
        every_query, every_key = (_Rows(slice(0, sum(s.n for s in x)), Segment(0, 1, 0)) for x in (queries, keys))
        return _placed(ends, every_query, every_key)
    half = len(keys) // 2
    shift = sum(s.n for s in keys[:half])
    first, second = (_by_spans(begin, end, queries, x) for x in (keys[:half], keys[half:]))
    return first + [
        Piece(x.queries, slice(x.keys.start + shift, x.keys.stop + shift), x.band, x.limits, x.batch) for x in second
    ]


def _local(begin: Array, end: Array, keys: Segments) -> tuple[Array, Array]:
    """Intervals of tokens as intervals of rows of the key segments: as many for each as there are segments."""
    found = []
    for x in (begin, end):
        rows = [s.first(x) + at for s, at in zip(keys, offsets(keys), strict=True)]
        found.append(np.concatenate(rows, -1))
    return found[0], found[1]


def _few(begin: Array, end: Array, most: int) -> Any:
    """The same intervals, joined where they touch, rising, and no more than the query with most has; None if that is
    more than `most`.
    """
    begin, end = begin.copy(), end.copy()
    for r in range(1, begin.shape[-1]):
        # An interval that begins where the last one ends takes that in; an empty one passes the last one on.
        some = begin[..., r - 1] < end[..., r - 1]
        empty = begin[..., r] >= end[..., r]
        touches = some & (empty | (begin[..., r] == end[..., r - 1]))
        end[..., r] = np.where(touches & empty, end[..., r - 1], end[..., r])
        begin[..., r] = np.where(touches, begin[..., r - 1], begin[..., r])
        end[..., r - 1] = np.where(touches, begin[..., r - 1], end[..., r - 1])
    some = begin < end
    counts = some.sum(-1)
    count = max(int(counts.max(initial=0)), 1)
    if count > most:
        return None
    if count < begin.shape[-1]:
        order = np.argsort(~some, -1, kind="stable")[..., :count]
        begin, end = (np.take_along_axis(x, order, -1) for x in (begin, end))
    for r in range(count):  # an empty one is where the last one ends
        last = end[..., r - 1] if r else np.zeros_like(end[..., 0])
        empty = begin[..., r] >= end[..., r]
        begin[..., r], end[..., r] = (np.where(empty, last, x[..., r]) for x in (begin, end))
    return begin, end


def _trim(begin: Array, end: Array) -> Any:
    """The rows of queries that see a key, from the first to the last, those of the keys, and their ends; or None."""
    some = begin < end
    rows = np.flatnonzero(some.any((0, 1, 3)))
    if not len(rows):
        return None
    q0, q1 = int(rows[0]), int(rows[-1]) + 1
    k0, k1 = int(begin[some].min()), int(end[some].max())
    begin, end = (np.clip(x[:, :, q0:q1] - k0, 0, k1 - k0) for x in (begin, end))
    return (q0, q1), (k0, k1), begin, end


def _band(begin: Array, end: Array, n_k: int) -> Band | None:
    """The band that makes the same pairs visible, if there is one."""
    if begin.shape[:2] != (1, 1) or begin.shape[3] > 1:
        return None
    begin, end = begin[0, 0, :, 0], end[0, 0, :, 0]
    at, some = np.arange(len(begin)), begin < end
    low, high = -FAR, FAR
    cut = some & (begin > 0)
    if cut.any():
        low = int((begin - at)[cut][0])
    cut = some & (end < n_k)
    if cut.any():
        high = int((end - 1 - at)[cut][0])
    b, e = np.clip(at + low, 0, n_k), np.clip(at + high + 1, 0, n_k)
    if not np.where(some, (b == begin) & (e == end), b >= e).all():
        return None
    if high < FAR:
        return Band(FAR if low == -FAR else high - low, 0, high)
    return Band(FAR if low == -FAR else 0, FAR, 0 if low == -FAR else low)
