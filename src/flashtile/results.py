"""Grads: the results of a backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple


class Grads(NamedTuple):
    """Gradients of one call; dbias and dsink are None without a bias or sink.

    In a backend's results dq, dk and dv have rank 4, and dbias and dsink the axes of bias and sink.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any
