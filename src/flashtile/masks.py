"""Spans of the masks that people use: documents, padding, prefixes, sinks, chunks, and any mask or function.

Arguments are NumPy arrays, or torch tensors, on whose device the spans are then made; lengths alone give NumPy arrays
unless a device is named. Query i stands at key i + n_k - n_q: the last query is aligned with the last key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashtile.errors import DTypeError, ShapeError
from flashtile.spans import FARTHEST, MAX_SPANS, MaskFunction, Spans, library

SLAB = 1 << 22  # pairs that from_function() evaluates at a time


def documents(ids: Any = None, *, lengths: Any = None) -> Spans:
    """Each query sees the keys of its document: a run of equal ids, (n,) or (batch, n); or documents of these lengths.

    With causal=True each document is causal by itself.
    """
    if (ids is None) == (lengths is None):
        raise ShapeError("documents: expected ids or lengths, got both or neither")
    if lengths is not None:
        lengths = _array(lengths)
        xp = library(lengths)
        number = xp.arange(len(lengths)) if xp is np else xp.arange(len(lengths), device=lengths.device)
        ids = np.repeat(number, lengths) if xp is np else xp.repeat_interleave(number, lengths)
    ids = _array(ids)
    begin, end = _runs(ids)
    return Spans(*((x[:, None] for x in (begin, end)) if ids.ndim == 2 else (begin, end)))


def padding(lengths: Any, n_k: int | None = None, side: str = "right") -> Spans:
    """Each sequence has `lengths` (batch,) keys in use; the others, on this side, are padding. Left needs n_k."""
    if side not in ("left", "right"):
        raise ShapeError(f"side: expected left or right, got {side!r}")
    lengths = _array(lengths)[:, None, None]
    if side == "right":
        return Spans(0, lengths)
    if n_k is None:
        raise ShapeError("n_k: expected the number of keys, for padding on the left, got None")
    return Spans(n_k - lengths, n_k)


def prefix_lm(prefix: Any, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """A causal mask with a prefix, a number or (batch,), that every query sees: it includes the causal limit."""
    if hasattr(prefix, "shape") and len(prefix.shape):
        prefix = _array(prefix)[:, None, None]
        device = getattr(prefix, "device", None) if library(prefix) is not np else None
    at = _positions(n_q, n_k, device)
    return Spans(0, library(at).maximum(at + 1, prefix if hasattr(prefix, "shape") else _full_like(at, prefix)))


def causal_with_blocks(ids: Any) -> Spans:
    """A causal mask where each token also sees all of its block, such as an image's tokens among text.

    ids, (n,) or (batch, n): a run of equal ids from 0 on is a block; -1 is text. It includes the causal limit.
    """
    ids = _array(ids)
    xp = library(ids)
    at = _positions(ids.shape[-1], None, None if xp is np else ids.device)
    end = xp.where(ids >= 0, _runs(ids)[1], at + 1)
    return Spans(0, end[:, None] if ids.ndim == 2 else end)


def sink_window(left: int, sinks: int, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """The first `sinks` keys, the query's own, and `left` keys before it: it includes the causal limit."""
    at = _positions(n_q, n_k, device)
    xp = library(at)
    begin, end = at - left, at + 1
    apart = begin > sinks  # otherwise they are one span
    stacks = ((at * 0, xp.where(apart, begin, end)), (xp.where(apart, sinks, end), end))
    return Spans(*(xp.stack(stack, -1)[None, None] for stack in stacks))


def chunks(size: int, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """Each query sees the keys of its chunk of `size` tokens. With causal=True it is chunked attention."""
    return block_local(size, 0, 0, n_q, n_k, device)


def block_local(size: int, before: int, after: int, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """Each query sees its own block of `size` keys, `before` blocks before it and `after` blocks after it."""
    block = _positions(n_q, n_k, device) // size
    return Spans((block - before) * size, (block + 1 + after) * size)


def dilated(steps: int, rate: int, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """Each query sees every `rate`-th key, `steps` of them (up to 8), its own the last."""
    if not 1 <= steps <= MAX_SPANS:
        raise ShapeError(f"steps: expected 1 to {MAX_SPANS}, one span each, got {steps}")
    at = _positions(n_q, n_k, device)
    keys = library(at).stack([at - rate * n for n in reversed(range(steps))], -1)[None, None]
    return Spans(keys, keys + 1)


def flashmask(rows: Any, causal: bool = True) -> Spans:
    """Spans of FlashMask's startend_row_indices, (batch, heads, keys, 1, 2 or 4): from which rows each key is hidden.

    causal: (start,) hides it from all rows from start on, (start, end) from rows start..end-1. Otherwise (start, end)
    hides it from rows from start on below the diagonal and from rows before end above it; four numbers are a start and
    an end below the diagonal, then a start and an end above it.
    """
    rows = _array(rows)
    count = rows.shape[-1] if rows.ndim == 4 else 0
    if count not in ((1, 2) if causal else (2, 4)):
        wanted = "1 or 2" if causal else "2 or 4"
        raise ShapeError(f"rows: expected (batch, heads, keys, {wanted}), got {tuple(rows.shape)}")
    batch, heads, n_k, _ = rows.shape
    xp = library(rows)

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        x = rows[b, h, j]
        if causal:
            return (j <= i) & ~((i >= x[..., 0]) & (i < x[..., 1] if count == 2 else True))
        below = (i >= x[..., 0]) & (i < x[..., 1] if count == 4 else True)
        above = (i < x[..., -1]) & (i >= x[..., 2] if count == 4 else True)
        return ~xp.where(j <= i, below, above)

    return from_function(visible, batch, heads, n_k, n_k, None if xp is np else rows.device)


def from_mask(mask: Any) -> Spans:
    """The spans of a boolean mask, True where a query may attend: up to (batch, heads, queries, keys)."""
    if not hasattr(mask, "ndim") or "bool" not in str(mask.dtype) or not 2 <= mask.ndim <= 4:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if hasattr(mask, "dtype") else type(mask).__name__
        raise DTypeError(f"mask: expected a boolean array of 2 to 4 axes, (batch, heads, queries, keys), got {got}")
    return _joined([_limits(mask[(None,) * (4 - mask.ndim)], 0)])


def from_function(visible: MaskFunction, batch: int, heads: int, n_q: int, n_k: int, device: Any = None) -> Spans:
    """The spans of visible(b, h, i, j), evaluated for some queries at a time."""
    b, h, i, j = (
        _range(n, device).reshape([-1 if axis == at else 1 for axis in range(4)])
        for at, n in enumerate((batch, heads, n_q, n_k))
    )
    xp, at_once, parts, first = library(i), max(SLAB // max(batch * heads * n_k, 1), 1), [], 0
    while first < max(n_q, 1):
        rows = i[:, :, first : first + at_once]
        found = visible(b, h, rows, j)
        if "bool" not in str(getattr(found, "dtype", type(found))):
            raise DTypeError(f"visible: expected booleans, got {getattr(found, 'dtype', type(found).__name__)}")
        found = xp.asarray(found) if xp is np else xp.as_tensor(found, device=i.device)
        shape = [*found.shape[:2], rows.shape[2], n_k] if found.ndim == 4 else [1, 1, rows.shape[2], n_k]
        parts.append(_limits(xp.broadcast_to(found, shape), first))
        first += at_once
    return _joined(parts)


def intersection(a: Spans, b: Spans) -> Spans:
    """What both make visible."""
    return _from_pairs(*intersected(*_pairs(a), *_pairs(b)))


def union(a: Spans, b: Spans) -> Spans:
    """What one of them makes visible: the complement of the intersection of their complements."""
    return _from_pairs(*complement(*intersected(*complement(*_pairs(a)), *complement(*_pairs(b)))))


def _pairs(spans: Spans) -> tuple[Any, Any]:
    return spans.begin, spans.end


def intersected(begin: Any, end: Any, other_begin: Any, other_end: Any) -> tuple[Any, Any]:
    """Rising pairs of the intersection, and after them empty ones at FARTHEST. Sorted apart, they still match."""
    xp = library(begin)
    b = xp.maximum(begin[..., :, None], other_begin[..., None, :])
    e = xp.minimum(end[..., :, None], other_end[..., None, :])
    some = b < e
    count = begin.shape[-1] + other_begin.shape[-1] - 1
    found = [xp.where(some, x, FARTHEST).reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1]) for x in (b, e)]
    if xp is np:
        return np.sort(found[0], -1)[..., :count], np.sort(found[1], -1)[..., :count]
    return xp.sort(found[0], -1).values[..., :count], xp.sort(found[1], -1).values[..., :count]


def complement(begin: Any, end: Any) -> tuple[Any, Any]:
    xp = library(begin)
    join = np.concatenate if xp is np else xp.cat
    return join([begin[..., :1] * 0, end], -1), join([begin, begin[..., :1] * 0 + FARTHEST], -1)


def _from_pairs(begin: Any, end: Any) -> Spans:
    """Spans of rising pairs with empty ones among them; as few as the query with the most has."""
    xp = library(begin)
    some = begin < end
    begin, end = (xp.where(some, x, FARTHEST) for x in (begin, end))
    begin, end = (np.sort(x, -1) if xp is np else xp.sort(x, -1).values for x in (begin, end))
    most = max(int(some.sum(-1).max()) if some.shape[0] and some.shape[2] else 0, 1)
    if most > MAX_SPANS:
        _too_many(some.sum(-1), 0)
    return Spans(begin[..., :most], end[..., :most])


def _limits(mask: Any, first: int) -> Any:
    """Begin and end, (batch, heads, queries, spans, 2), of the runs of a mask whose first query is number `first`."""
    xp, (*lead, n_k) = library(mask), mask.shape
    rows = math.prod(lead)
    join = np.concatenate if xp is np else xp.cat
    # A run begins and ends where neighbours differ; the keys at which they do are found row by row, in rising order.
    edges = join([mask[..., :1], mask[..., 1:] != mask[..., :-1], mask[..., -1:]], -1)
    edges = edges.reshape(rows, edges.shape[-1])
    row, key = np.nonzero(edges) if xp is np else xp.nonzero(edges, as_tuple=True)
    counts = xp.bincount(row, minlength=rows)
    most = int(counts.max()) // 2 if rows and n_k else 0
    if most > MAX_SPANS:
        _too_many(counts.reshape(lead) // 2, first)
    number = _range(len(row), None if xp is np else mask.device) - (counts.cumsum(0) - counts)[row]
    shape = (rows, 2 * max(most, 1))
    found = np.zeros(shape, np.int64) if xp is np else xp.zeros(shape, dtype=xp.int64, device=mask.device)
    found[row, number] = key
    return found.reshape(*lead, max(most, 1), 2)


def _joined(parts: Sequence[Any]) -> Spans:
    """Spans of all queries; parts with fewer spans are filled up with empty ones."""
    xp, most = library(parts[0]), max(x.shape[3] for x in parts)
    filled = []
    for x in parts:
        room = (0, most - x.shape[3])
        filled.append(np.pad(x, [(0, 0)] * 3 + [room, (0, 0)]) if xp is np else xp.nn.functional.pad(x, (0, 0, *room)))
    limits = np.concatenate(filled, 2) if xp is np else xp.cat(filled, 2)
    return Spans(limits[..., 0], limits[..., 1])


def _too_many(counts: Any, first: int) -> None:
    counts = np.asarray(counts if isinstance(counts, np.ndarray) else counts.cpu())
    batch, head, query = np.argwhere(counts > MAX_SPANS)[0].tolist()
    raise ShapeError(
        f"mask: expected at most {MAX_SPANS} runs of visible keys per query, got {counts[batch, head, query]} for "
        f"batch {batch}, head {head}, query {query + first}; pass it as mask="
    )


def _runs(ids: Any) -> tuple[Any, Any]:
    """Begin and end of the run of equal ids that each position is in."""
    xp, n = library(ids), ids.shape[-1]
    at = xp.arange(n) if xp is np else xp.arange(n, device=ids.device)
    changes = ids[..., 1:] != ids[..., :-1]
    begin, end = xp.where(changes, at[1:], 0), xp.where(changes, at[1:], n)
    edge = ids[..., :1] * 0 if n else ids
    join = np.concatenate if xp is np else xp.cat
    begin, end = join([edge, begin], -1), join([end, edge + n], -1)
    if xp is np:
        return np.maximum.accumulate(begin, -1), np.minimum.accumulate(end[..., ::-1], -1)[..., ::-1]
    return begin.cummax(-1).values, end.flip(-1).cummin(-1).values.flip(-1)


def _positions(n_q: int, n_k: int | None, device: Any) -> Any:
    """The keys at which the queries stand."""
    return _range(n_q, device) + (0 if n_k is None else n_k - n_q)


def _range(n: int, device: Any) -> Any:
    if device is None:
        return np.arange(n)
    import torch

    return torch.arange(n, device=device)


def _full_like(x: Any, number: int) -> Any:
    return x * 0 + number


def _array(x: Any) -> Any:
    """A tensor as it is, anything else as a NumPy array; of integers."""
    if not hasattr(x, "__torch_function__"):
        x = np.asarray(x)
        if x.dtype.kind not in "iu" and x.size:
            raise DTypeError(f"expected integers, got {x.dtype}")
        return x.astype(np.int64, copy=False)
    if x.is_floating_point():
        raise DTypeError(f"expected integers, got {x.dtype}")
    return x.long()
