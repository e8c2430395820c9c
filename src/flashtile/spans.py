"""Spans: which keys each query sees, as a few intervals per query."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from flashtile.errors import DTypeError, ShapeError

MAX_SPANS = 8  # of a query
FARTHEST = 2**31 - 1  # limits are int32
MaskFunction = Callable[[Any, Any, Any, Any], Any]  # of batch, head, query and key


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
        xp = library(begin)
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

    @classmethod
    def from_mask(cls, mask: Any) -> Spans:
        """Return the spans of a boolean mask, True where a query may attend: up to (batch, heads, queries, keys)."""
        from flashtile import masks

        return masks.from_mask(mask)

    @classmethod
    def from_function(
        cls,
        visible: MaskFunction,
        batch: int,
        heads: int,
        n_q: int,
        n_k: int,
        device: Any = None,
    ) -> Spans:
        """Return the spans of visible(b, h, i, j), which is True where query i may see key j, as a mask_mod of
        FlexAttention is. It is evaluated for some queries at a time, on NumPy arrays, or on tensors on this device.
        """
        from flashtile import masks

        return masks.from_function(visible, batch, heads, n_q, n_k, device)

    def __and__(self, other: Spans) -> Spans:
        """What both make visible."""
        if not isinstance(other, Spans):
            return NotImplemented
        from flashtile import masks

        return masks.intersection(self, other)

    def __or__(self, other: Spans) -> Spans:
        """What one of them makes visible."""
        if not isinstance(other, Spans):
            return NotImplemented
        from flashtile import masks

        return masks.union(self, other)

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
        xp = library(self.limits)
        keys = np.arange(n_k) if xp is np else xp.arange(n_k, device=self.limits.device)
        return within(self.limits[..., None, :, :], keys[:, None])


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
        if isinstance(x, int) and not -FARTHEST <= x <= FARTHEST:
            x = FARTHEST if x > 0 else -1
        if tensor is None:
            x = np.asarray(x)
            integers = x.dtype.kind in "iu"
        else:
            import torch

            import flashtile.pytorch  # noqa: F401  registers Spans with torch.export

            if not isinstance(x, torch.Tensor):
                if isinstance(x, np.ndarray) and x.ndim:
                    raise DTypeError(f"spans: expected begin and end of one library, got a NumPy array for {name}")
                # An integer is filled in on the device: a copy from the host would wait, and graphs cannot capture it.
                whole = isinstance(x, int) and not isinstance(x, bool)
                x = torch.full((), x, device=tensor.device) if whole else torch.as_tensor(x, device=tensor.device)
            if x.device != tensor.device:
                raise DTypeError(f"spans: expected begin and end on one device, got {tensor.device} and {x.device}")
            integers = not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
        if not integers:
            raise DTypeError(f"spans: expected integers, got {name} of {x.dtype}")
        wide = x.astype(np.int64, copy=False) if tensor is None else x.to(torch.int64)
        if "uint64" in str(x.dtype):  # what was beyond the others is now below 0
            wide = library(wide).where(wide < 0, FARTHEST, wide)
        found.append(wide)
    return found[0], found[1]


def _rising(xp: Any, begin: Any, end: Any) -> Any:
    """Return limits that never fall; raise an error for spans that overlap or fall, where values can be read."""
    begin, end = (x.clip(0, FARTHEST) for x in (begin, end))
    begin, end = (x.astype(np.int32) if xp is np else x.to(xp.int32) for x in (begin, end))
    seen = begin < end
    found, ok = [], None
    last: Any = 0
    for r in range(begin.shape[-1]):
        b, e, some = begin[..., r], end[..., r], seen[..., r]
        if r:
            rises = ~some | (b >= last)
            ok = rises if ok is None else ok & rises
            b, e = xp.maximum(b, last), xp.maximum(e, last)
        found += [xp.where(some, b, last), xp.where(some, e, last)]
        last = found[-1]
    if ok is not None and is_readable(xp, ok) and not bool(ok.all()):
        at = tuple(np.argwhere(~np.asarray(ok))[0].tolist())
        pairs = [(int(b), int(e)) for b, e in zip(begin[at].tolist(), end[at].tolist(), strict=True)]
        raise ShapeError(f"spans: expected disjoint spans in rising order, got {pairs} for (batch, head, query) {at}")
    shape = (*begin.shape, 2)
    if xp is not np:
        return xp.stack(found, -1).reshape(shape)
    limits = np.empty((*begin.shape[:-1], len(found)), np.int32)
    for n, x in enumerate(found):
        limits[..., n] = x
    limits = limits.reshape(shape)
    limits.flags.writeable = False
    return limits


def library(x: Any) -> Any:
    """NumPy or torch."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def is_readable(xp: Any, x: Any) -> bool:
    """Whether values can be read now, without waiting for a device."""
    if xp is np:
        return True
    from flashtile.pytorch.interception import readable

    return not xp.compiler.is_compiling() and readable(x)


def has_values(x: Any) -> bool:
    """Whether x has values, which it lacks while it is traced; to read them may be to wait for a device."""
    if isinstance(x, np.ndarray):
        return True
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._subclasses import FakeTensor

    return not (isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x))


def within(limits: Any, keys: Any) -> Any:
    """Whether keys (..., 1) are in any span of limits (..., spans, 2)."""
    return ((limits[..., 0] <= keys) & (keys < limits[..., 1])).any(-1)
