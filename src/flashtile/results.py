"""Grads: the results of a backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple


class Grads(NamedTuple):
    """Gradients of one call; dbias and dsink are None without a bias or sink.

    A runner gives dq, dk and dv in the caller's layout, and dbias (of rank 4) and dsink in accumulator precision.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any
