"""Shards: which tokens of a sequence, or of packed documents, each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from flashtile.band import FAR, Band
from flashtile.checks.arguments import to_host
from flashtile.checks.numbers import check_flag, check_integer
from flashtile.checks.options import band as check_band
from flashtile.checks.options import combine_bands
from flashtile.checks.options import window as check_window
from flashtile.distributed.balance import assign, chunk_bounds
from flashtile.distributed.visible import Visible, starts_of
from flashtile.errors import DTypeError, ShapeError
from flashtile.numerics.dtypes import Array
from flashtile.spans import Spans, limits_of


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens start, start + step, ... of a document, n of them."""

    document: int
    start: int
    step: int
    n: int


@dataclass(frozen=True, slots=True)
class Shards:
    """The runs of tokens that each rank holds, in the order in which it holds them.

    lengths are those of the documents, which follow one another in one row of tokens; a sequence is one document.
    Every token belongs to one rank; ranks may have different numbers of tokens, or none.
    """

    runs: tuple[tuple[Run, ...], ...]
    lengths: tuple[int, ...]
    starts: Array = field(init=False, repr=False, compare=False)  # of the documents in the row, and its length
    counts: tuple[int, ...] = field(init=False, repr=False, compare=False)  # the tokens of each rank
    code: Array = field(init=False, repr=False, compare=False)  # all of it as int64, for decode()

    def __post_init__(self) -> None:
        lengths = tuple(check_integer("lengths", n, 0, FAR) for n in self.lengths)
        runs = tuple(tuple(Run(*(int(n) for n in _fields(run))) for run in rank) for rank in self.runs)
        if not runs:
            raise ShapeError("runs: expected those of at least one rank, got none")
        for run in (run for rank in runs for run in rank):
            fits = 0 <= run.document < len(lengths) and run.start >= 0 and run.step >= 1 and run.n >= 1
            if not fits or run.start + (run.n - 1) * run.step >= lengths[run.document]:
                raise ShapeError(f"runs: expected runs within documents of {_brief(lengths)} tokens, got {run}")
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "starts", starts_of(lengths))
        object.__setattr__(self, "counts", tuple(sum(run.n for run in rank) for rank in runs))
        numbers = [x for rank in runs for run in rank for x in _fields(run)]
        code = [len(runs), len(lengths), *lengths, *map(len, runs), *numbers]
        object.__setattr__(self, "code", np.array(code, np.int64))
        held = np.zeros(self.tokens, np.int64)
        for rank in range(self.ranks):
            held[self.indices(rank)] += 1
        if sum(self.counts) != self.tokens or (held != 1).any():
            missing = np.flatnonzero(held != 1)
            at = int(missing[0]) if len(missing) else 0
            raise ShapeError(f"runs: expected each of {self.tokens} tokens once, got token {at} {held[at]} times")

    @classmethod
    def contiguous(
        cls, tokens: int | None = None, *, ranks: int, documents: Any = None, cu_seqlens: Any = None
    ) -> Shards:
        """Cut the tokens into one piece for each rank. Give their number, or the lengths or the starts of documents."""
        lengths, ranks = _lengths(tokens, documents, cu_seqlens), _ranks(ranks)
        return cls._of_chunks(lengths, [[r] for r in range(ranks)], ranks)

    @classmethod
    def zigzag(cls, tokens: int | None = None, *, ranks: int, documents: Any = None, cu_seqlens: Any = None) -> Shards:
        """Cut the tokens into two pieces for each rank, one from the front and one from the back: causal pairs are
        balanced.
        """
        lengths, ranks = _lengths(tokens, documents, cu_seqlens), _ranks(ranks)
        return cls._of_chunks(lengths, [[r, 2 * ranks - 1 - r] for r in range(ranks)], 2 * ranks)

    @classmethod
    def striped(cls, tokens: int | None = None, *, ranks: int, documents: Any = None, cu_seqlens: Any = None) -> Shards:
        """Deal the tokens out one by one: rank r has the tokens r, r + ranks, ..."""
        lengths, ranks = _lengths(tokens, documents, cu_seqlens), _ranks(ranks)
        starts = starts_of(lengths)
        return cls(tuple(_runs(starts, r, ranks, int(starts[-1])) for r in range(ranks)), lengths)

    @classmethod
    def balanced(
        cls,
        tokens: int | None = None,
        *,
        ranks: int,
        documents: Any = None,
        cu_seqlens: Any = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        band: Band | None = None,
        spans: Spans | None = None,
    ) -> Shards:
        """Give each rank as many tokens, and as many visible pairs, as any other, in as few pieces as that takes."""
        lengths, ranks = _lengths(tokens, documents, cu_seqlens), _ranks(ranks)
        starts = starts_of(lengths)
        causal = check_flag("causal", causal)
        window, band = check_window("window", window, None), check_band("band", band, None)
        combined, align_end = combine_bands(causal, window, band)
        limits = limits_of(spans)
        limits = limits if limits is None or isinstance(limits, np.ndarray) else limits.cpu().numpy()
        if limits is not None and limits.shape[2] not in (1, starts[-1]):
            raise ShapeError(f"spans: expected 1 or {starts[-1]} queries, got {limits.shape[2]}")
        chunks, total = assign(Visible(int(starts[-1]), starts, combined, align_end, limits).counts(), ranks)
        return cls._of_chunks(lengths, chunks, total)

    @classmethod
    def _of_chunks(cls, lengths: tuple[int, ...], chunks: Sequence[Sequence[int]], total: int) -> Shards:
        """Of the row in `total` equal chunks, those that each rank holds; neighbouring chunks are one piece."""
        starts = starts_of(lengths)
        bounds = chunk_bounds(int(starts[-1]), total)
        found = []
        for rank in chunks:
            pieces: list[list[int]] = []
            for c in rank:
                if pieces and pieces[-1][1] == bounds[c]:
                    pieces[-1][1] = bounds[c + 1]
                else:
                    pieces.append([bounds[c], bounds[c + 1]])
            found.append(tuple(run for a, b in pieces for run in _runs(starts, a, 1, b)))
        return cls(tuple(found), lengths)

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @property
    def tokens(self) -> int:
        """The tokens of all ranks."""
        return int(self.starts[-1])

    @staticmethod
    def decode(code: Array) -> Shards:
        """The Shards of a code."""
        return _decoded(code.tobytes())

    def indices(self, rank: int) -> Array:
        """Where the tokens of a rank are in the row of all tokens."""
        return self._of(rank, self.starts)

    def positions(self, rank: int) -> Array:
        """The position of each token of a rank in its document, as rotary embeddings need it."""
        return self._of(rank, np.zeros(len(self.starts), np.int64))

    def _of(self, rank: int, starts: Array) -> Array:
        rank = check_integer("rank", rank, 0, self.ranks - 1)
        found = [starts[run.document] + run.start + run.step * np.arange(run.n) for run in self.runs[rank]]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def shard(self, x: Any, rank: int, dim: int = -2) -> Any:
        """The part of x that a rank holds, along the axis of tokens. Tensors keep their gradients."""
        _check_axis("x", x, dim)
        if x.shape[dim] != self.tokens:
            raise ShapeError(f"x: expected {self.tokens} tokens along axis {dim}, got shape {tuple(x.shape)}")
        return _take(x, self.indices(rank), dim)

    def restore(self, parts: Sequence[Any], dim: int = -2) -> Any:
        """The whole, from the parts of all ranks."""
        counts, parts = self.counts, list(parts)
        for n, x in enumerate(parts):
            _check_axis(f"parts[{n}]", x, dim)
        if len(parts) != self.ranks or any(x.shape[dim] != n for x, n in zip(parts, counts, strict=True)):
            found = [tuple(x.shape) for x in parts]
            raise ShapeError(f"parts: expected {_brief(counts)} tokens along axis {dim}, got shapes {found}")
        held = np.concatenate([self.indices(rank) for rank in range(self.ranks)])
        if isinstance(parts[0], np.ndarray):
            joined = np.concatenate(parts, dim)
        else:
            import torch

            joined = torch.cat(parts, dim)
        return _take(joined, np.argsort(held), dim)


def _runs(starts: Array, first: int, step: int, end: int) -> tuple[Run, ...]:
    """The tokens first, first + step, ... before `end` of the row, cut where documents end."""
    found = []
    document = int(np.searchsorted(starts, first, "right")) - 1
    while first < end:
        start, stop = int(starts[document]), min(int(starts[document + 1]), end)
        if first < stop:
            n = -(-(stop - first) // step)
            found.append(Run(document, first - start, step, n))
            first += n * step
        document += 1
    return tuple(found)


@lru_cache(maxsize=64)
def _decoded(code: bytes) -> Shards:
    ranks, documents, *rest = np.frombuffer(code, np.int64).tolist()
    lengths, counts, numbers = rest[:documents], rest[documents : documents + ranks], iter(rest[documents + ranks :])
    runs = [tuple(Run(*(next(numbers) for _ in range(4))) for _ in range(n)) for n in counts]
    return Shards(tuple(runs), tuple(lengths))


def _take(x: Any, indices: Array, dim: int) -> Any:
    if isinstance(x, np.ndarray):
        return np.take(x, indices, dim)
    import torch

    return x.index_select(dim, torch.as_tensor(indices, device=x.device))


def _check_axis(name: str, x: Any, dim: int) -> None:
    shape = getattr(x, "shape", None)
    if shape is None:
        raise DTypeError(f"{name}: expected an array or a tensor, got {type(x).__name__}")
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"dim: expected an axis of {name}, whose shape is {tuple(shape)}, got {dim}")


def _ranks(ranks: int) -> int:
    return check_integer("ranks", ranks, 1, 1 << 20)


def _lengths(tokens: int | None, documents: Any, cu_seqlens: Any) -> tuple[int, ...]:
    """The lengths of the documents, from one of three arguments."""
    forms = {"tokens": tokens, "documents": documents, "cu_seqlens": cu_seqlens}
    given = [name for name, x in forms.items() if x is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise ShapeError(f"tokens: expected one of tokens, documents and cu_seqlens, got {got}")
    if tokens is not None:
        return (check_integer("tokens", tokens, 0, FAR),)
    name = given[0]
    x = np.asarray(to_host(name, documents if documents is not None else cu_seqlens))
    if x.ndim != 1 or x.dtype.kind not in "iu":
        raise DTypeError(f"{name}: expected integers along one axis, got shape {x.shape} of {x.dtype}")
    x = x.astype(np.int64)
    if name == "cu_seqlens":
        if not len(x) or x[0] != 0:
            raise ShapeError(f"cu_seqlens: expected starts that rise from 0, got {_brief(x)}")
        x = np.diff(x)
    if (x < 0).any():
        wanted = "lengths of at least 0" if name == "documents" else "starts that rise"
        raise ShapeError(f"{name}: expected {wanted}, got a length of {int(x.min())}")
    return tuple(x.tolist())


def _fields(run: Any) -> Iterable[Any]:
    if isinstance(run, Run):
        return run.document, run.start, run.step, run.n
    if not isinstance(run, Sequence) or len(run) != 4:
        raise DTypeError(f"runs: expected a sequence of Run for each rank, got {run!r} in place of a Run")
    return run


def _brief(x: Any) -> str:
    return np.array2string(np.asarray(x), threshold=8)
