"""What a kernel is given: named tuples of pointers, strides and numbers. A pointer of None compiles a feature out."""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """[sequence, head, row, column], columns contiguous: q, k, v, out, lse and their gradients."""

    ptr: Any
    sequence: int
    head: int
    row: int


class Pairs(NamedTuple):
    """[sequence, head, query, key] with any strides, 0 where broadcast: mask, bias and its gradient."""

    ptr: Any
    sequence: int
    head: int
    row: int
    column: int


class Lengths(NamedTuple):
    """The longest sequence, and device pointers to where packed sequences begin and to the keys in use, or None."""

    n_q: int
    n_k: int
    sequences: int
    cu_q: Any
    cu_k: Any
    kv: Any


class Rule(NamedTuple):
    """What happens to q.k before the softmax, and to the weights after it. None compiles a feature out.

    Flat, because Triton 3.6 loses constants in nested tuples. scale, softcap and keep_scale are the bits of doubles: a
    float argument would be rounded to 32 bits. left, right and offset are band.py's; no offset means that each
    sequence's last query stands at its last key.
    """

    scale: int
    scale_first: int | None  # not None where scale <= 0: a maximum does not survive such a factor
    softcap: int | None
    left: int
    right: int
    offset: int | None
    mask: Any
    mask_sequence: int
    mask_head: int
    mask_row: int
    mask_column: int
    bias: Any
    bias_sequence: int
    bias_head: int
    bias_row: int
    bias_column: int
    alibi: Any
    alibi_sequence: int
    alibi_head: int
    seed: int | None  # of dropout
    threshold: int
    keep_scale: int  # of 1 / (1 - dropout)
    heads: int
