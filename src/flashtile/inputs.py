"""Inputs: what changes from one call to the next when all else stays: the tensors, and the seed of dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashtile.problem import Problem


class Inputs(NamedTuple):
    """The tensors may be as the caller gave them or views of a Problem: they count by where they begin.

    seed: a number, or on a GPU also a tensor of one, which only the kernels read.
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    alibi: Any
    sink: Any
    kv_lengths: Any
    cu_q: Any
    cu_k: Any
    descale: Any
    seed: Any

    @classmethod
    def of(cls, p: Problem) -> Inputs:
        options = (p.mask, p.bias, p.alibi, p.sink, p.kv_lengths, p.cu_q, p.cu_k, p.descale)
        return cls(p.q, p.k, p.v, *options, p.seed)


TENSORS = Inputs._fields[:-1]
