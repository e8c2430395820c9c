"""Arithmetic: pieces of attention, forward into float32 sums of out and lse, backward into float32 gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile
from flashtile.distributed.pieces import Piece
from flashtile.distributed.plan import Heads
from flashtile.origin import Origin
from flashtile.spans import Spans


@dataclass(frozen=True)
class Keys:
    """Rows of keys and values, and what goes with each key. Iterates over tensors and their axes of rows."""

    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # (batch or 1, heads or 1, 1, rows)
    mask: Tensor | None = None  # likewise

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for x, axis in ((self.k, 2), (self.v, 2), (self.bias, 3), (self.mask, 3)):
            if x is not None:
                yield x, axis

    @property
    def kinds(self) -> tuple[bool, bool]:
        """Whether there are a bias and a mask."""
        return self.bias is not None, self.mask is not None

    @staticmethod
    def of(tensors: Sequence[Tensor], kinds: tuple[bool, bool]) -> Keys:
        """Tensors of these kinds, in order."""
        k, v, *rest = tensors
        return Keys(k, v, *(rest.pop(0) if there else None for there in kinds))

    def like(self, tensors: Sequence[Tensor]) -> Keys:
        """Other tensors of the same kinds."""
        return Keys.of(tensors, self.kinds)


@dataclass(frozen=True)
class Sums:
    """Sums of gradients of rows of keys, in float32 or float64. Iterates over tensors and their axes of rows."""

    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for x, axis in ((self.dk, 2), (self.dv, 2), (self.dbias, 3)):
            if x is not None:
                yield x, axis

    def like(self, tensors: Sequence[Tensor]) -> Sums:
        """Other tensors of the same kinds."""
        return Sums(*tensors)

    def zeros(self, rows: int) -> Sums:
        return self.like([x.new_zeros((*x.shape[:axis], rows, *x.shape[axis + 1 :])) for x, axis in self])

    def of_lane(self, call: Call) -> Sums:
        return Sums(self.dk[:, call.k_heads], self.dv[:, call.k_heads], call.lane_of(self.dbias))


class Saved(NamedTuple):
    """What the backward pass needs of the queries."""

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None


@dataclass(frozen=True)
class Call:
    """What all pieces of a call have in common on one rank, for all of its heads or for a lane of them."""

    whole: Heads  # of the rank
    heads: Heads  # of the lane
    all_heads: int
    numbers: dict[str, Any]  # scale, softcap, dropout, seed, deterministic, threads
    backend: str
    alibi: Tensor | None = None  # (batch or 1, all heads)
    bias: Tensor | None = None  # of all pairs: (batch or 1, all heads or 1, rows, all tokens)
    mask: Tensor | None = None

    @property
    def q_heads(self) -> slice:
        """The query heads of the lane among those of the rank."""
        return slice(self.heads.first - self.whole.first, self.heads.stop - self.whole.first)

    @property
    def k_heads(self) -> slice:
        keys, first = self.heads.keys, self.whole.keys.start
        return slice(keys.start - first, keys.stop - first)

    def lane_of(self, x: Any) -> Any:
        """A lane of a tensor that has the rank's query heads, or one for all."""
        return x if x is None or x.shape[1] == 1 else x[:, self.q_heads]

    def lanes(self, n: int) -> list[Call]:
        return [replace(self, heads=heads) for heads in self.heads.lanes(n)]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def forward(call: Call, pieces: Sequence[Piece], q: Tensor, keys: Keys, out: Tensor, lse: Tensor) -> None:
    """Merge what the queries see of these keys into out and lse."""
    for piece in pieces:
        for heads in call.heads.calls():
            part = _Part(call, piece, heads, q, keys)
            found, found_lse = flashtile.attention(
                part.q,
                part.k,
                part.v,
                return_lse=True,
                backend=call.backend,
                out_dtype=_name(out.dtype),
                **part.options,
            )
            if part.far is not None:
                found_lse = found_lse - part.far
            sums = part.queries(out), part.queries(lse)
            flashtile.merge(*sums, found, found_lse, into=sums)


def backward(
    call: Call, pieces: Sequence[Piece], saved: Saved, keys: Keys, dq: Tensor, sums: Sums, dbias: Tensor | None
) -> None:
    """Add the gradients of these pairs to dq, to the sums, which have the heads of the lane, and to dbias."""
    for piece in pieces:
        for heads in call.heads.calls():
            part = _Part(call, piece, heads, saved.q, keys)
            dout, out, lse = (part.queries(x) for x in (saved.dout, saved.out, saved.lse))
            if part.far is not None:
                lse = lse + part.far
            into = flashtile.Grads(
                part.queries(dq),
                part.sum_of_keys(sums.dk),
                part.sum_of_keys(sums.dv),
                part.bias_sum(sums.dbias, dbias),
                None,
            )
            flashtile.attention_backward(
                dout,
                part.q,
                part.k,
                part.v,
                out,
                lse,
                dlse=None if saved.dlse is None else part.queries(saved.dlse),
                out_dtype=_name(out.dtype),
                grad_dtype=_name(dq.dtype),
                into=into,
                backend=call.backend,
                **part.options,
            )


class _Part:
    """A piece for some heads of the lane: its rows of q, k and v, and its options of attention()."""

    def __init__(self, call: Call, piece: Piece, heads: tuple[slice, slice], q: Tensor, keys: Keys) -> None:
        self.call, self.piece = call, piece
        self.lane_q, self.lane_k = heads
        self.q_heads, self.k_heads = _shifted(heads[0], call.q_heads.start), _shifted(heads[1], call.k_heads.start)
        self.every = _shifted(heads[0], call.heads.first)  # among all heads
        self.q, self.k, self.v = self.queries(q), self.keys(keys.k), self.keys(keys.v)
        self.options = dict(call.numbers)
        self.far: Tensor | None = None  # ALiBi: what scores are below those of the call
        if piece.band is not None:
            self.options["band"] = piece.band
        if piece.limits is not None:
            limits = piece.copies.get(q.device)
            if limits is None:
                limits = piece.copies[q.device] = torch.as_tensor(piece.limits, device=q.device)
            self.options["spans"] = Spans.of(limits if limits.shape[1] == 1 else limits[:, self.every])
        if self.options.get("dropout"):
            self.options["origin"] = self._origin()
        for name in ("mask", "bias"):
            if (x := getattr(keys, name)) is not None:
                self.options[name] = self.with_keys(x)
            if (x := getattr(call, name)) is not None:
                self.options[name] = self.with_pairs(x)
        if call.alibi is not None:
            slopes = call.alibi[_batch(call.alibi, piece.batch), self.every]
            scaled = slopes * piece.slope
            self.options["alibi"] = scaled if len(slopes) > 1 else scaled[0]
            if piece.far:
                self.far = (slopes * piece.far)[..., None]

    def queries(self, x: Tensor) -> Tensor:
        return x[self.piece.batch, self.q_heads, self.piece.queries]

    def keys(self, x: Tensor) -> Tensor:
        return x[self.piece.batch, self.k_heads, self.piece.keys]

    def sum_of_keys(self, x: Tensor) -> Tensor:
        return x[self.piece.batch, self.lane_k, self.piece.keys]

    def with_keys(self, x: Tensor) -> Tensor:
        """Of a tensor with the rank's query heads, or with one for all."""
        return self._with_keys(x, self.q_heads)

    def sum_with_keys(self, x: Tensor) -> Tensor:
        """Of a tensor with the lane's query heads, or with one for all."""
        return self._with_keys(x, self.lane_q)

    def _with_keys(self, x: Tensor, heads: slice) -> Tensor:
        heads = slice(None) if x.shape[1] == 1 else heads
        return x[_batch(x, self.piece.batch), heads, :, self.piece.keys]

    def with_pairs(self, x: Tensor) -> Tensor:
        tokens = self.piece.key
        assert tokens is not None
        heads = slice(None) if x.shape[1] == 1 else self.every
        columns = slice(tokens.start, tokens.end, tokens.step)
        return x[_batch(x, self.piece.batch), heads, self.piece.queries, columns]

    def bias_sum(self, of_keys: Tensor | None, of_pairs: Tensor | None) -> Tensor | None:
        """Of the sum of a bias' gradients, this part."""
        if of_keys is not None:
            return self.sum_with_keys(of_keys)
        return None if of_pairs is None else self.with_pairs(of_pairs)

    def _origin(self) -> Any:
        query, key = self.piece.query, self.piece.key
        assert query is not None and key is not None
        base: Origin = self.options.get("origin") or Origin()
        return Origin(
            query=base.query + base.query_step * query.start,
            key=base.key + base.key_step * key.start,
            head=base.head + self.every.start,
            sequence=base.sequence + (self.piece.batch.start or 0),
            heads=base.heads or self.call.all_heads,
            query_step=base.query_step * query.step,
            key_step=base.key_step * key.step,
        )


def _batch(x: Tensor, batch: slice) -> slice:
    return batch if x.shape[0] > 1 else slice(None)


def _shifted(some: slice, by: int) -> slice:
    return slice(some.start + by, some.stop + by)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
