"""The gradient of sinks, from the lse and delta of all rows."""

from __future__ import annotations

from typing import Any

import torch

from flashtile.problem import Problem


def heads_at(p: Problem) -> int:
    """The axis of heads of an lse in the caller's layout; a call of rank 2 has no such axis."""
    return 1 if p.packed else p.rank - 3


def like_lse(rows: Any, lse: Any, packed: bool) -> Any:
    """Statistics of rows, (batch, heads, room), in the shape of an lse in the caller's layout."""
    return rows[0, :, : lse.shape[0]].T if packed else rows[..., : lse.shape[-1]].reshape(lse.shape)


def sink_gradient(sink: Any, lse: Any, delta: Any, heads: int) -> Any:
    """-sum over rows of exp(sink - lse) * delta, whose axis of heads is this one; an empty row has no part in it."""
    rows_at = tuple(axis for axis in range(lse.ndim) if axis != heads)
    weight = torch.exp(sink.to(lse.dtype).reshape([1 if axis in rows_at else -1 for axis in range(lse.ndim)]) - lse)
    parts = torch.where(torch.isneginf(lse), torch.zeros_like(delta), weight * delta)
    return -parts.sum(rows_at).reshape(sink.shape)
