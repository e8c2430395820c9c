"""Grads: the results of a backward pass. Target: the dtype that was asked for, and the buffers that are added to."""

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


class Target(NamedTuple):
    """What a call of attention_backward() wants: dq, dk and dv in this dtype, and gradients added to these buffers.

    dbias and dsink have the dtype of bias and sink, or this one if it has more bits. The buffers are checked and in the
    caller's layout, None for results to be allocated. A runner adds to those of dq, dk and dv and returns them; dbias
    and dsink it may return apart from their buffers, as it does without a target. With a target, out and lse may be
    those of attention to more keys.
    """

    dtype: str
    into: Grads = Grads(None, None, None, None, None)
