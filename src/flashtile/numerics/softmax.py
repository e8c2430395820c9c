"""OnlineSoftmax: absorb a tile, merge two states, normalize; and the rule for empty rows."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtile.checks.arguments import check_rows_of_floats, check_size
from flashtile.numerics.dtypes import QUIET, Array, accumulator, name_of, widen

# The larger a row's maximum, the fewer bits of its lse are left for the logarithm of the sum. From this lse on, a
# backward pass does not compute weights from it, but recomputes the two separately. core/lse.h has the same number.
COARSE = 64.0


def is_coarse(lse: Array) -> Array:
    coarse: Array = (np.abs(lse) >= COARSE) & np.isfinite(lse)
    return coarse


def is_own(lse: Array, own: Array) -> Array:
    """Whether an lse is this one, that of given keys, as far as its own precision tells.

    The backward pass of a block of keys may be given the lse of rows of more keys. core/lse.h has the same number.
    """
    near: Array = np.abs(own - lse) <= 4 * np.finfo(lse.dtype).eps * np.maximum(np.abs(lse), 1)
    return near


def pivot(m: Array) -> Array:
    """What to subtract before exp: the maximum, or 0 for a row that has seen no key (its weights are 0 anyway)."""
    return np.where(np.isneginf(m), 0, m).astype(m.dtype, copy=False)


@dataclass(slots=True)
class OnlineSoftmax:
    """The state of a block of rows after some of their keys: (m, l, O), eq. 3 of docs/algorithm.md."""

    m: Array  # [br]      running maximum of the scores
    l: Array  # [br]      running sum of exp(score - m)
    O: Array  # [br, dv]  running sum of exp(score - m) * value

    @classmethod
    def empty(cls, rows: int, width: int, dtype: Any, sink: float | None = None) -> "OnlineSoftmax":
        """The state before any key. A sink is a first key with the score `sink` and the value 0."""
        start = -np.inf if sink is None else sink
        return cls(
            np.full(rows, start, dtype),
            np.full(rows, 0 if np.isneginf(start) else 1, dtype),
            np.zeros((rows, width), dtype),
        )

    def rescale(self, m_new: Array) -> Array:
        """Rescale l and O to a new maximum (eq. 5) and return the factor exp(m - m_new)."""
        factor: Array = np.exp(self.m - pivot(m_new))
        self.m, self.l, self.O = m_new, self.l * factor, self.O * factor[:, None]
        return factor

    def absorb(self, S: Array) -> tuple[Array, Array]:
        """Update m and l by the scores of one tile, [br, bc], and rescale O (eq. 4 and 5).

        Returns the weights P = exp(S - m) and the rescale factor. The caller adds P V to O, since it may change P
        first (dropout does).
        """
        factor = self.rescale(np.maximum(self.m, S.max(axis=1, initial=-np.inf)))
        P = np.exp(S - pivot(self.m)[:, None])
        self.l = self.l + P.sum(axis=1)
        return P, factor

    def merge(self, other: "OnlineSoftmax") -> None:
        """Merge the state of the same rows over other keys (eq. 6): exact, in any order."""
        m_new = np.maximum(self.m, other.m)
        self.rescale(m_new)
        other = OnlineSoftmax(other.m, other.l, other.O)
        other.rescale(m_new)
        self.l, self.O = self.l + other.l, self.O + other.O

    def normalized(self) -> Array:
        """The output (eq. 7); 0 for a row that saw no key."""
        out: Array = self.O / np.where(self.l == 0, 1, self.l)[:, None]
        return out

    def lse(self) -> Array:
        """The log-sum-exp (eq. 7); -inf for a row that saw no key."""
        with np.errstate(**QUIET):
            lse: Array = pivot(self.m) + np.log(self.l)
        return lse


@np.errstate(**QUIET)
def merge_normalized(*results: Array) -> tuple[Array, Array]:
    """Merge results over disjoint keys, given as out, lse, out, lse, ..., into out and lse over all keys (eq. 8).

    (0, -inf) is the identity, and the out of a row with lse -inf may be anything. More than two are summed in float64,
    since pairwise merging would round at each step.
    """
    outs, lses = results[::2], results[1::2]
    real = np.float64 if len(outs) > 2 else np.result_type(*lses)
    base = pivot(np.maximum.reduce([lse.astype(real, copy=False) for lse in lses]))
    weights = [np.exp(lse - base) for lse in lses]
    total: Array = sum(weights[1:], weights[0])  # dividing by it makes the weights sum to 1, however coarse an lse is
    share = np.where(total == 0, 1, total)
    shares: Any = (
        np.where(np.isneginf(lse)[..., None], 0, (w / share)[..., None] * out)
        for w, out, lse in zip(weights, outs, lses, strict=True)
    )
    out: Array = sum(shares)
    return out, base + np.log(total)


def online_softmax(x: Array, chunk: int) -> Array:
    """Softmax over the last axis, `chunk` columns at a time: one pass computes m and l, a second writes.

    Sums and result are float32 for 16-bit numbers.
    """
    check_rows_of_floats("x", x)
    chunk = check_size("chunk", chunk)
    rows = widen(x, accumulator(name_of(x.dtype))).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    state = OnlineSoftmax.empty(len(rows), 0, rows.dtype)
    with np.errstate(**QUIET):
        for j in range(0, rows.shape[1], chunk):
            state.absorb(rows[:, j : j + chunk])
        total = np.where(state.l == 0, 1, state.l)
        P: Array = np.exp(rows - pivot(state.m)[:, None]) / total[:, None]
    return P.reshape(x.shape)
