"""Parts of a whole call: its sequences, heads, queries and keys divided at random, also in steps; and their sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import flashtile as ft
from flashtile.numerics import dropout
from tests.support.grid import Call, Case, Size, build

OPTIONS = ("mask", "dropout")
WHOLE = Size(2, 4, 2, 13, 22, 8, 6)


@dataclass(frozen=True)
class Part:
    """Where a part lies in the whole: `heads` are key heads, each with its group of query heads."""

    sequences: slice
    heads: slice
    queries: slice
    keys: slice

    def q_heads(self, group: int) -> slice:
        return slice(self.heads.start * group, self.heads.stop * group)

    def rows(self, group: int) -> tuple[slice, slice, slice]:
        """Where its queries are in arrays like q, out and lse."""
        return self.sequences, self.q_heads(group), self.queries

    def columns(self) -> tuple[slice, slice, slice]:
        """Where its keys are in k and v."""
        return self.sequences, self.heads, self.keys

    def origin(self, group: int, heads: int) -> ft.Origin:
        return ft.Origin(
            self.queries.start,
            self.keys.start,
            self.heads.start * group,
            self.sequences.start,
            heads,
            self.queries.step or 1,
            self.keys.step or 1,
        )

    def of(self, whole: Call) -> Call:
        """The call of this part."""
        group = whole.q.shape[1] // whole.k.shape[1]
        rows, columns = self.rows(group), self.columns()
        options = dict(whole.options) | {"origin": self.origin(group, whole.q.shape[1])}
        if "mask" in options:
            options["mask"] = options["mask"][(*rows, self.keys)]
        arrays = {name: getattr(whole, name)[rows] for name in ("q", "dout", "dlse")}
        return replace(whole, **arrays, k=whole.k[columns], v=whole.v[columns], options=options)


@st.composite
def ranges(draw: Any, n: int, most: int) -> list[slice]:
    """Slices that together have each of n places once: up to `most` interleaved ones, each cut once or not at all."""
    step = draw(st.integers(1, min(most, n)))
    found = []
    for start in range(step):
        length = len(range(start, n, step))
        cut = draw(st.integers(0, length - 1))
        for first, last in ((0, cut - 1), (cut, length - 1)):
            if first <= last:
                found.append(slice(start + first * step, start + last * step + 1, step))
    return found


@st.composite
def divided(draw: Any, dtype: str = "float64", n_q: tuple[int, ...] = (1, 13)) -> tuple[Call, list[Part]]:
    """A call with dropout, and its parts."""
    call = build(Case(replace(WHOLE, n_q=draw(st.sampled_from(n_q))), dtype, OPTIONS))
    cut = [draw(st.sampled_from(([slice(0, 2)], [slice(0, 1), slice(1, 2)]))) for _ in range(2)]
    queries, keys = draw(ranges(call.q.shape[2], 5)), draw(ranges(call.k.shape[2], 5))
    return call, [Part(s, h, i, j) for s in cut[0] for h in cut[1] for i in queries for j in keys]


def merged(whole: Call, parts: list[Part], forward: Callable[[Call], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Out and lse of the whole from those of its parts."""
    group = whole.q.shape[1] // whole.k.shape[1]
    out, lse = np.zeros(whole.dout.shape), np.full(whole.dout.shape[:-1], -np.inf)
    for part in parts:
        rows = part.rows(group)
        into = out[rows], lse[rows]
        ft.merge(*into, *forward(part.of(whole)), into=into)
    return out, lse


def summed(
    whole: Call, parts: list[Part], out: Any, lse: Any, backward: Callable[[Call, Any, Any], ft.Grads]
) -> Iterator[tuple[str, Any]]:
    """The gradients of q, k and v of the whole from those of its parts, which take out and lse of the whole."""
    group = whole.q.shape[1] // whole.k.shape[1]
    total = {name: np.zeros(x.shape) for name, x in (("dq", whole.q), ("dk", whole.k), ("dv", whole.v))}
    for part in parts:
        rows, columns = part.rows(group), part.columns()
        grads = backward(part.of(whole), out[rows], lse[rows])
        for name, place in (("dq", rows), ("dk", columns), ("dv", columns)):
            total[name][place] += getattr(grads, name)
    yield from total.items()


def kept(call: Call) -> Any:
    """Which weights of a call are kept, counted one head after the other."""
    o, options = call.problem().origin, call.options
    (batch, heads, n_q), n_k = call.q.shape[:3], call.k.shape[2]
    i, j = o.query + o.query_step * np.arange(n_q), o.key + o.key_step * np.arange(n_k)
    found = np.empty((batch, heads, n_q, n_k), bool)
    for s, h in np.ndindex(batch, heads):
        head = (o.sequence + s) * o.heads + o.head + h
        found[s, h] = dropout.keep(options["seed"], head, i[:, None], j, options["dropout"])
    return found


def showing_bits(call: Call) -> Call:
    """The same call with equal weights and a v whose outputs show which of them are kept; without other options."""
    n = call.k.shape[2]
    v = np.broadcast_to(np.eye(n, dtype=call.q.dtype), (*call.k.shape[:2], n, n))
    options = {name: call.options[name] for name in ("dropout", "seed", "origin")}
    return replace(call, q=np.zeros_like(call.q), v=np.ascontiguousarray(v), options=options)
