"""Spans of common masks: documents, padding, prefixes, sinks, chunks; and of any boolean mask or function.

Arguments are NumPy arrays, or torch tensors, on whose device the spans are then made. Numbers alone give NumPy arrays
unless a device is named. Query i is at position i + n_k - n_q: the last query is aligned with the last key.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashtile.checks.numbers import check_flag, check_integer
from flashtile.errors import DTypeError, ShapeError
from flashtile.spans import FARTHEST, MAX_SPANS, MaskFunction, Spans, has_values, is_readable, library, limits_of

SLAB = 1 << 22  # pairs that from_function() evaluates at a time


def documents(ids: Any = None, *, lengths: Any = None) -> Spans:
    """Each query sees the keys of its document. A document is a run of equal ids, (n,) or (batch, n), or has a length.

    With causal=True each document is causal by itself.
    """
    if (ids is None) == (lengths is None):
        raise ShapeError("documents: expected ids or lengths, got both or neither")
    if lengths is not None:
        lengths = _integers("lengths", lengths, 1)
        xp = library(lengths)
        if is_readable(xp, lengths) and bool((lengths < 0).any()):
            raise ShapeError(f"lengths: expected none below 0, got {int(lengths.min())}")
        end = lengths.cumsum(0)
        return Spans(*((np.repeat if xp is np else xp.repeat_interleave)(x, lengths) for x in (end - lengths, end)))
    ids = _integers("ids", ids, 1, 2)
    begin, end = _runs(ids)
    return Spans(*((x[:, None] for x in (begin, end)) if ids.ndim == 2 else (begin, end)))


def padding(lengths: Any, n_k: int | None = None, side: str = "right") -> Spans:
    """Each sequence uses `lengths` keys, (batch,); the others, on this side, are padding. side="left" needs n_k."""
    if side not in ("left", "right"):
        raise ShapeError(f"side: expected left or right, got {side!r}")
    lengths = _integers("lengths", lengths, 1)[:, None, None]
    if n_k is not None:
        n_k = check_integer("n_k", n_k, 0, None)
    if side == "right":
        return Spans(0, lengths)
    if n_k is None:
        raise ShapeError("n_k: expected the number of keys, for padding on the left, got None")
    return Spans(n_k - lengths, n_k)


def prefix_lm(prefix: Any, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """Each query sees the first `prefix` keys, a number or (batch,), and keys up to its own: causal=True is implied."""
    if not _is_number(prefix):
        prefix = _integers("prefix", prefix, 0, 1).reshape(-1, 1, 1)
        if device is None and library(prefix) is not np:
            device = prefix.device
    at = _positions(n_q, n_k, device)
    xp = library(at)
    if _is_number(prefix):
        prefix = at * 0 + check_integer("prefix", prefix, None, FARTHEST)
    elif xp is not np:
        prefix = xp.as_tensor(prefix, device=device)
    return Spans(0, xp.maximum(at + 1, prefix))


def causal_with_blocks(ids: Any) -> Spans:
    """A causal mask where each token also sees all of its block, such as the tokens of an image among text.

    ids, (n,) or (batch, n): a run of equal ids from 0 on is a block; -1 is text. causal=True is implied.
    """
    ids = _integers("ids", ids, 1, 2)
    end = library(ids).where(ids >= 0, _runs(ids)[1], _range(ids.shape[-1], _device_of(ids)) + 1)
    return Spans(0, end[:, None] if ids.ndim == 2 else end)


def sink_window(left: int, sinks: int, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """Each query sees the first `sinks` keys, `left` keys before its own, and its own: causal=True is implied."""
    left, sinks = check_integer("left", left, 0, FARTHEST), check_integer("sinks", sinks, 0, FARTHEST)
    at = _positions(n_q, n_k, device)
    xp = library(at)
    begin, end = at - left, at + 1
    apart = begin > sinks  # otherwise they are one span
    stacks = ((at * 0, xp.where(apart, begin, end)), (xp.where(apart, sinks, end), end))
    return Spans(*(xp.stack(stack, -1)[None, None] for stack in stacks))


def chunks(size: int, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """Each query sees the keys of its chunk of `size` tokens. With causal=True this is chunked attention."""
    return block_local(size, 0, 0, n_q, n_k, device)


def block_local(size: int, before: int, after: int, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """Each query sees its own block of `size` keys, `before` blocks before it and `after` blocks after it."""
    size = check_integer("size", size, 1, FARTHEST)
    before, after = check_integer("before", before, 0, FARTHEST), check_integer("after", after, 0, FARTHEST)
    block = _positions(n_q, n_k, device) // size
    return Spans((block - before) * size, (block + 1 + after) * size)


def dilated(steps: int, rate: int, n_q: int, n_k: int | None = None, device: Any = None) -> Spans:
    """Each query sees its own key and every `rate`-th one before it, `steps` keys in all (up to 8)."""
    steps = check_integer("steps", steps, 1, MAX_SPANS)  # a span each
    rate = check_integer("rate", rate, 1, FARTHEST)
    at = _positions(n_q, n_k, device)
    keys = library(at).stack([at - rate * n for n in reversed(range(steps))], -1)[None, None]
    return Spans(keys, keys + 1)


def flashmask(rows: Any, causal: bool = False, n_q: int | None = None) -> Spans:
    """Spans of FlashMask's startend_row_indices, (batch, heads, keys, 1, 2 or 4): from which rows each key is hidden.

    causal: a start, or a start and an end, of the hidden rows, besides the causal limit. Otherwise two numbers are a
    start, from which on all rows are hidden, and an end, before which they are; four are two starts, each with its end.
    Rows are hidden on both sides of the diagonal. There are n_q of them, by default as many as keys; heads are query
    heads, or one.
    """
    rows, causal = _integers("rows", rows, 4), check_flag("causal", causal)
    batch, heads, n_k, count = rows.shape
    if count not in ((1, 2) if causal else (2, 4)):
        wanted = "1 or 2" if causal else "2 or 4"
        raise ShapeError(f"rows: expected (batch, heads, keys, {wanted}) for causal={causal}, got {tuple(rows.shape)}")
    n_q = n_k if n_q is None else check_integer("n_q", n_q, 0, None)

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        x = rows[b, h, j]
        if causal:
            return (j <= i + n_k - n_q) & ~((i >= x[..., 0]) & (i < x[..., 1] if count == 2 else True))
        if count == 2:
            return (i < x[..., 0]) & (i >= x[..., 1])
        return ~((i >= x[..., 0]) & (i < x[..., 1])) & ~((i >= x[..., 2]) & (i < x[..., 3]))

    return from_function(visible, batch, heads, n_q, n_k, _device_of(rows))


def from_mask(mask: Any) -> Spans:
    """The spans of a boolean mask, True where a query may attend: up to (batch, heads, queries, keys)."""
    if not hasattr(mask, "ndim") or "bool" not in str(mask.dtype) or not 2 <= mask.ndim <= 4:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if hasattr(mask, "dtype") else type(mask).__name__
        raise DTypeError(f"mask: expected a boolean array of 2 to 4 axes, (batch, heads, queries, keys), got {got}")
    return _joined([_limits(mask[(None,) * (4 - mask.ndim)], 0)])


def from_function(visible: MaskFunction, batch: int, heads: int, n_q: int, n_k: int, device: Any = None) -> Spans:
    """The spans of visible(b, h, i, j), evaluated for some queries at a time."""
    if not callable(visible):
        raise DTypeError(f"visible: expected a function of (b, h, i, j), got {type(visible).__name__}")
    sizes = {"batch": batch, "heads": heads, "n_q": n_q, "n_k": n_k}
    batch, heads, n_q, n_k = (check_integer(name, n, 0, None) for name, n in sizes.items())
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
        lead = tuple(found.shape[:2]) if found.ndim == 4 else (1, 1)
        shape = (*lead, rows.shape[2], n_k)
        try:
            seen = xp.broadcast_to(found, shape)
        except (ValueError, RuntimeError):
            raise ShapeError(f"visible: expected shape {shape}, or axes of 1, got {tuple(found.shape)}") from None
        parts.append(_limits(seen, first))
        first += at_once
    return _joined(parts)


def intersection(a: Spans, b: Spans) -> Spans:
    """The pairs that both make visible."""
    return _from_pairs(*intersected(*_pairs(a, b)))


def union(a: Spans, b: Spans) -> Spans:
    """The pairs that at least one makes visible: the complement of the intersection of their complements."""
    begin, end, other_begin, other_end = _pairs(a, b)
    return _from_pairs(*complement(*intersected(*complement(begin, end), *complement(other_begin, other_end))))


def _pairs(a: Spans, b: Spans) -> tuple[Any, Any, Any, Any]:
    """Begin and end of both, which must fit together."""
    x, y = limits_of(a), limits_of(b)
    if x is None or y is None:
        raise DTypeError("spans: expected two flashtile.Spans, got None")
    here, there = ("NumPy arrays" if library(z) is np else f"tensors on {z.device}" for z in (x, y))
    if here != there:
        hint = "; masks of numbers alone are NumPy arrays unless a device is named" if "NumPy" in here + there else ""
        raise DTypeError(f"spans: expected both of one library and device, got {here} and {there}{hint}")
    sizes, others = (tuple(z.shape[:3]) for z in (x, y))
    if any(n != m and 1 not in (n, m) for n, m in zip(sizes, others, strict=True)):
        raise ShapeError(f"spans: expected (batch, heads, queries) that broadcast together, got {sizes} and {others}")
    return a.begin, a.end, b.begin, b.end


def intersected(begin: Any, end: Any, other_begin: Any, other_end: Any) -> tuple[Any, Any]:
    """Rising pairs of the intersection, and after them empty ones at FARTHEST. Sorted apart, they still match."""
    xp = library(begin)
    b = xp.maximum(begin[..., :, None], other_begin[..., None, :])
    e = xp.minimum(end[..., :, None], other_end[..., None, :])
    some = b < e
    count = begin.shape[-1] + other_begin.shape[-1] - 1
    begin, end = (_sorted(xp.where(some, x, FARTHEST).reshape(*x.shape[:-2], -1))[..., :count] for x in (b, e))
    return begin, end


def complement(begin: Any, end: Any) -> tuple[Any, Any]:
    """The gaps between rising pairs, the last of them up to FARTHEST."""
    xp, zero = library(begin), begin[..., :1] * 0
    return xp.concatenate([zero, end], -1), xp.concatenate([begin, zero + FARTHEST], -1)


def _from_pairs(begin: Any, end: Any) -> Spans:
    """Spans of rising pairs with empty ones among them; as few as the query with the most has, if that is known."""
    xp = library(begin)
    some = begin < end
    begin, end = (_sorted(xp.where(some, x, FARTHEST)) for x in (begin, end))
    most = begin.shape[-1]
    if most > MAX_SPANS or has_values(some):
        most = max(int(some.sum(-1).max()) if 0 not in some.shape[:3] else 0, 1)
    if most > MAX_SPANS:
        _too_many(some.sum(-1), 0)
    return Spans(begin[..., :most], end[..., :most])


def _limits(mask: Any, first: int) -> Any:
    """Begin and end, (batch, heads, queries, spans, 2), of the runs of a mask whose first query is number `first`."""
    xp, (*lead, n_k) = library(mask), mask.shape
    rows = math.prod(lead)
    # A run begins and ends where neighbours differ; the keys at which they do are found row by row, in rising order.
    edges = xp.concatenate([mask[..., :1], mask[..., 1:] != mask[..., :-1], mask[..., -1:]], -1)
    edges = edges.reshape(rows, edges.shape[-1])
    row, key = np.nonzero(edges) if xp is np else xp.nonzero(edges, as_tuple=True)
    counts = xp.bincount(row, minlength=rows)
    most = int(counts.max()) // 2 if rows and n_k else 0
    if most > MAX_SPANS:
        _too_many(counts.reshape(lead) // 2, first)
    number = _range(len(row), _device_of(mask)) - (counts.cumsum(0) - counts)[row]
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
    limits = xp.concatenate(filled, 2)
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
    at = _range(n, _device_of(ids))
    changes = ids[..., 1:] != ids[..., :-1]
    begin, end = xp.where(changes, at[1:], 0), xp.where(changes, at[1:], n)
    edge = ids[..., :1] * 0 if n else ids
    begin, end = xp.concatenate([edge, begin], -1), xp.concatenate([end, edge + n], -1)
    if xp is np:
        return np.maximum.accumulate(begin, -1), np.minimum.accumulate(end[..., ::-1], -1)[..., ::-1]
    return begin.cummax(-1).values, end.flip(-1).cummin(-1).values.flip(-1)


def _positions(n_q: int, n_k: int | None, device: Any) -> Any:
    """The keys at which the queries stand."""
    n_q = check_integer("n_q", n_q, 0, None)
    return _range(n_q, device) + (0 if n_k is None else check_integer("n_k", n_k, 0, None) - n_q)


def _range(n: int, device: Any) -> Any:
    if device is None:
        return np.arange(n)
    import torch

    return torch.arange(n, device=device)


def _device_of(x: Any) -> Any:
    """The device of a tensor; None for a NumPy array."""
    return None if isinstance(x, np.ndarray) else x.device


def _sorted(x: Any) -> Any:
    """Sort along the last axis."""
    return np.sort(x, -1) if isinstance(x, np.ndarray) else x.sort(-1).values


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or type(x).__name__ == "SymInt"


def _integers(name: str, x: Any, *ranks: int) -> Any:
    """A tensor, or anything else as a NumPy array, of 64-bit integers and with as many axes as one of these."""
    if hasattr(x, "__torch_function__"):
        integers = not (x.is_floating_point() or x.is_complex() or x.dtype is sys.modules["torch"].bool)
    else:
        x = np.asarray(x)
        integers = x.dtype.kind in "iu" or not x.size
    if not integers:
        raise DTypeError(f"{name}: expected integers, got {x.dtype}")
    if x.ndim not in ranks:
        wanted = " or ".join(f"{n} ax{'i' if n == 1 else 'e'}s" for n in ranks)
        raise ShapeError(f"{name}: expected {wanted}, got shape {tuple(x.shape)}")
    return x.astype(np.int64, copy=False) if isinstance(x, np.ndarray) else x.long()
