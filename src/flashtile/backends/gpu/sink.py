"""The gradient of sinks, from the row statistics of a backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from flashtile.problem import Problem

LOG2E = 1 / math.log(2)


def head_axis(p: Problem) -> int:
    """The head axis of an lse in the caller's layout; a call of rank 2 has none."""
    return 1 if p.packed else p.rank - 3


def sink_gradient(sink: Any, rows: Iterable[Any], heads: int) -> Any:
    """-sum over rows of exp(sink - lse) * delta. rows: log2, delta and tops; heads: their head axis.

    tops hold half the maximum in base 2, because finfo.min * log2(e) would overflow.
    """
    log2, delta, tops = rows
    others = tuple(axis for axis in range(log2.ndim) if axis != heads)
    above = sink.to(log2.dtype).reshape([1 if axis in others else -1 for axis in range(log2.ndim)]) * (LOG2E / 2) - tops
    return -(torch.exp2(2 * above - log2) * delta).sum(others).reshape(sink.shape)
