"""Segments: evenly spaced tokens. Rows of a tensor are described by a list of segments, in the order of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from flashtile.distributed.shards import Shards
from flashtile.errors import UnsupportedError
from flashtile.numerics.dtypes import Array

Interval = tuple[int, int]  # begin and end of tokens


class Segment(NamedTuple):
    """The tokens start, start + step, ..., n of them, of the row of all tokens."""

    start: int
    step: int
    n: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + (self.n - 1) * self.step + 1

    def first(self, tokens: Array) -> Array:
        """For each token, how many of the segment's come before it."""
        found: Array = np.clip(-((self.start - tokens) // self.step), 0, self.n)
        return found

    def part(self, first: int, stop: int, stride: int = 1) -> Segment:
        """The rows first, first + stride, ... before stop of this segment."""
        return Segment(self.start + first * self.step, self.step * stride, max(-(-(stop - first) // stride), 0))


Segments = tuple[Segment, ...]


def of_rank(shards: Shards, rank: int) -> Segments:
    """The segments that a rank holds; runs of documents that follow one another are one."""
    found: list[Segment] = []
    for run in shards.runs[rank]:
        start = int(shards.starts[run.document]) + run.start
        if found and found[-1].step == run.step and found[-1].start + found[-1].n * run.step == start:
            found[-1] = found[-1]._replace(n=found[-1].n + run.n)
        else:
            found.append(Segment(start, run.step, run.n))
    return tuple(found)


def rows(segments: Segments) -> int:
    return sum(s.n for s in segments)


def tokens(segments: Segments) -> Array:
    """The token of each row."""
    return np.concatenate([np.zeros(0, np.int64), *(s.start + s.step * np.arange(s.n) for s in segments)])


def offsets(segments: Segments) -> list[int]:
    """The first row of each segment."""
    return list(accumulate((s.n for s in segments), initial=0))[:-1]


def rows_of(segments: Segments, rows: slice) -> Segments:
    """The segments of a range of rows."""
    found = []
    for s, at in zip(segments, offsets(segments), strict=True):
        a, b = max(rows.start - at, 0), min(rows.stop - at, s.n)
        if a < b:
            found.append(s.part(a, b))
    return tuple(found)


def within(segments: Segments, intervals: Iterable[Interval]) -> tuple[Segments, list[slice]]:
    """The parts of segments that are within disjoint, rising intervals, and the rows that they are."""
    found: list[Segment] = []
    where: list[slice] = []
    bounds = np.array([x for pair in intervals for x in pair], np.int64)
    for segment, offset in zip(segments, offsets(segments), strict=True):
        edges = segment.first(bounds).tolist()
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            if (
                a < b
                and where
                and where[-1].stop == offset + a
                and found[-1].end + segment.step - 1 == segment.start + a
            ):
                found[-1] = found[-1]._replace(n=found[-1].n + b - a)
                where[-1] = slice(where[-1].start, offset + b)
            elif a < b:
                found.append(segment.part(a, b))
                where.append(slice(offset + a, offset + b))
    return tuple(found), where


def moves(source: Segments, target: Segments) -> list[tuple[slice, slice]]:
    """Slices of rows of the source, and where their tokens are in the target."""
    found = []
    for s, s0 in zip(source, offsets(source), strict=True):
        for t, t0 in zip(target, offsets(target), strict=True):
            begin, end = max(s.start, t.start), min(s.end, t.end)
            if begin >= end:
                continue
            step = max(s.step if s.n > 1 else 1, t.step if t.n > 1 else 1)
            if (step % s.step and s.n > 1) or (step % t.step and t.n > 1):
                raise UnsupportedError(f"shards: expected steps that divide one another, got {s.step} and {t.step}")
            coarse, fine = (s, t) if s.n == 1 or (t.n > 1 and s.step >= t.step) else (t, s)
            if (coarse.start - fine.start) % fine.step:
                continue
            a, b = (int(x) for x in coarse.first(np.array([begin, end])))
            part = coarse.part(a, b)
            if part.n:
                found.append((_slice(s, s0, part), _slice(t, t0, part)))
    return found


def _slice(whole: Segment, offset: int, part: Segment) -> slice:
    """The rows of a part of a segment."""
    first = offset + (part.start - whole.start) // whole.step
    stride = max(part.step // whole.step, 1) if part.n > 1 else 1
    return slice(first, first + (part.n - 1) * stride + 1, stride)


def joined(parts: Sequence[Segments]) -> Segments:
    """A layout for all rows of some tensors: in the order of tokens if that makes no more segments than there are."""
    every = tuple(s for part in parts for s in part)
    held = np.sort(tokens(every))
    if not len(held):
        return ()
    edges = np.flatnonzero(np.diff(held) != 1)
    if len(edges) >= len(every):
        return every
    begin, end = held[np.r_[0, edges + 1]], held[np.r_[edges, len(held) - 1]] + 1
    return of_intervals(zip(begin.tolist(), end.tolist(), strict=True))


def of_intervals(intervals: Iterable[Interval]) -> Segments:
    return tuple(Segment(a, 1, b - a) for a, b in intervals)
