"""Standard attention, N x N, in float64: the oracle. Slow, plain, and right.

With `precision` every intermediate is rounded to a narrower dtype: this is "standard attention in the same dtype",
whose error is the yardstick for every other backend.
"""

import sys
from collections.abc import Callable

import numpy as np

from flashtile.backends.once import Once
from flashtile.cost.tiling import Tiling
from flashtile.host.arrays import Arrays
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import QUIET, Array, narrow, widen
from flashtile.numerics.head import Head, Scores, guarded_product, heads
from flashtile.numerics.softmax import is_own, pivot
from flashtile.problem import Problem
from flashtile.results import Grads, Target

Round = Callable[[Array], Array]


def rounding(precision: str) -> tuple[type[np.floating], Round]:
    """Return the type in which NumPy calculates, and the function that rounds every intermediate."""
    if precision in ("float64", "float32"):
        return np.dtype(precision).type, lambda x: x
    return np.float32, lambda x: widen(narrow(x, precision))


def tile(problem: Problem, capability: object = None) -> Tiling:
    """No tiles: the scores of a head are one piece."""
    return Tiling(max(problem.n_q, 1), max(problem.n_k, 1))


@np.errstate(**QUIET)
def forward(problem: Problem, precision: str = "float64") -> tuple[Array, Array]:
    """Return output and lse, rank 4 and 3, in the working precision (not rounded to out_dtype)."""
    real, r = rounding(precision)
    out = np.zeros(problem.out_shape(), real)
    lse = np.full(problem.out_shape()[:-1], -np.inf, real)
    for head in heads(problem):
        P, _, head.queries(lse)[...], _ = _weights(head, real, r)
        kept = head.kept(slice(0, head.n_q), slice(0, head.n_k), real)
        dropped = P.S if kept is None else r(P.S * kept)
        head.queries(out)[...] = r(guarded_product(dropped, widen(head.keys(problem.v), real), P.visible))
    return out, lse


@np.errstate(**QUIET)
def backward(
    problem: Problem,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    precision: str = "float64",
    *,
    bias_grad: bool = True,
    target: Target | None = None,
) -> Grads:
    """Compute gradients by eq. 9 to 14 of docs/algorithm.md, on whole matrices.

    The oracle computes its own statistics. With a target, out and lse may be those of attention to more keys, and are
    used for rows whose lse is not that of these keys.
    """
    real, r = rounding(precision)
    dq, dk, dv = (np.zeros(x.shape, real) for x in (problem.q, problem.k, problem.v))
    dbias = None if problem.bias is None or not bias_grad else np.zeros(problem.bias.shape, real)
    dsink = None if problem.sink is None else np.zeros(problem.sink.shape, real)
    for head in heads(problem):
        P, slope, row_lse, of_sink = _weights(head, real, r)
        share = _share(row_lse, head.queries(lse)) if target is not None else None
        if share is not None:
            P, of_sink = _scaled(P, share, r), of_sink * share
        Q, K, V = (widen(x, real) for x in (head.queries(problem.q), head.keys(problem.k), head.keys(problem.v)))
        dO = widen(head.queries(dout), real)
        kept = head.kept(slice(0, head.n_q), slice(0, head.n_k), real)
        dropped = P.S if kept is None else r(P.S * kept)
        O = guarded_product(dropped, V, P.visible)
        if share is not None:
            O = np.where(share[:, None] == 1, O, widen(head.queries(out), real))
        delta = (dO * O).sum(axis=1)
        if dlse is not None:
            delta = delta - widen(head.queries(dlse), real)
        delta = np.where(np.isneginf(row_lse), 0, delta)
        dP = r(dO @ V.T)
        if kept is not None:
            dP = r(dP * kept)
        dS = r(P.S * (dP - delta[:, None]))
        if P.visible is not None:
            dS = np.where(P.visible, dS, 0)
        if dbias is not None:
            head.add_pairs(dbias, dS, slice(0, head.n_q), slice(0, head.n_k))
        if dsink is not None:
            dsink[head.head] -= (of_sink * delta).sum()
        if slope is not None:
            dS = r(dS * slope)
        seen_by = None if P.visible is None else P.visible.T
        head.queries(dq)[...] = r(guarded_product(dS, K, P.visible) * real(problem.scale))
        head.keys(dk)[...] += r(guarded_product(dS.T, Q, seen_by) * real(problem.scale))
        head.keys(dv)[...] += r(guarded_product(dropped.T, dO, seen_by))
    return Grads(dq, dk, dv, dbias, dsink)


def _share(own: Array, lse: Array) -> Array:
    """What the weights of each row are multiplied by if its lse is that of more keys; 1 if it is the row's own."""
    share: Array = np.exp(own - np.where(np.isneginf(lse), np.inf, lse))
    return np.where(is_own(lse, own), 1, share)


def _scaled(P: Scores, share: Array, r: Round) -> Scores:
    weights = r(P.S * share[:, None])
    return Scores(weights if P.visible is None else np.where(P.visible, weights, 0), None, P.visible)


def probabilities(problem: Problem, rows: Array) -> Array:
    """Compute the softmax weights of chosen query rows only, (sequences, heads, rows, n_k)."""
    P = np.zeros((problem.sequences, problem.heads, len(rows), problem.n_k))
    for head in heads(problem):
        P[head.sequence, head.head, :, : head.n_k] = _weights(head, np.float64, lambda x: x, rows)[0].S
    return P


def _weights(
    head: Head, real: type[np.floating], r: Round, rows: slice | Array | None = None
) -> tuple[Scores, Array | None, Array, Array]:
    """Return softmax weights (as the S of Scores), the slope of softcap, the lse, and the weight of the sink."""
    p = head.problem
    rows = slice(0, head.n_q) if rows is None else rows
    Q, K = widen(head.queries(p.q)[rows], real), widen(head.keys(p.k), real)
    with np.errstate(**QUIET):
        s = head.scores(Q, K, rows, slice(0, head.n_k), masked=True)
        S = r(s.S)
        m = S.max(axis=1, initial=-np.inf if head.sink is None else head.sink)
        P = np.exp(S - pivot(m)[:, None])
        of_sink = np.exp((-np.inf if head.sink is None else head.sink) - pivot(m))
        l = P.sum(axis=1) + of_sink
        lse = pivot(m) + np.log(l, where=l > 0, out=np.full_like(l, -np.inf))
        lse = np.where(np.isnan(l), np.nan, lse)
        total = np.where(l == 0, 1, l)
        P, of_sink = r(P / total[:, None]), of_sink / total
        if s.visible is not None:  # 0 already, unless a NaN in the row reached m
            P = np.where(s.visible, P, real(0))
    return Scores(P, None, s.visible), s.slope, lse, of_sink


def prepare(problem: Problem, arrays: Arrays) -> tuple[Once, Inputs]:
    return Once(sys.modules[__name__], problem, arrays), Inputs.of(problem)
