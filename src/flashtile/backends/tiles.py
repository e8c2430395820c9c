"""Flash attention in NumPy: runs the events of schedule.py, forward and backward, in FA1 or FA2 order.

This is the implementation to read. schedule.py defines which block moves when, softmax.py how a tile updates the
running state, head.py what a score is; this module combines them. Nothing in SRAM is larger than a tile.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from flashtile.backends.once import Once
from flashtile.band import Kind
from flashtile.host.arrays import Arrays
from flashtile.inputs import Inputs
from flashtile.numerics import schedule
from flashtile.numerics.dtypes import QUIET, Array, widen
from flashtile.numerics.head import Head, guarded_product, heads
from flashtile.numerics.schedule import Event, Grid, Launch, Load, Make, Store, Tile, Zero
from flashtile.numerics.softmax import OnlineSoftmax, is_coarse, is_own, pivot
from flashtile.problem import Problem
from flashtile.results import Grads, Target

BLOCK = 128  # rows and columns of a tile unless the caller says otherwise
SHRINK = 2.0**-32  # scales values whose weighted sum overflows

Observer = Callable[[Event, "Machine"], None]


class Machine:
    """A simulated processor that runs one head, with large slow HBM, which has Q, K and V too, and small fast SRAM."""

    def __init__(self, head: Head, grid: Grid, real: Any, hbm: dict[str, Array]) -> None:
        p = head.problem
        self.head, self.grid, self.real = head, grid, real
        self.hbm = {"Q": head.queries(p.q), "K": head.keys(p.k), "V": head.keys(p.v), **hbm}
        self.sram: dict[str, Array] = {}

    def run(self, events: Iterator[Event], observe: Observer | None = None) -> None:
        with np.errstate(**QUIET):
            for event in events:
                match event:
                    case Load(name, n):
                        self.load(name, n)
                    case Zero(name, n):
                        self.zero(name, n)
                    case Tile():
                        self.tile(event)
                    case Store(name, n):
                        self.store(name, n)
                    case Launch():
                        self.sram.clear()
                    case Make(name, n):
                        self.make(name, n)
                if observe is not None:
                    observe(event, self)

    def load(self, name: str, n: int) -> None:
        self.sram[name] = widen(self.hbm[name][self.grid.block(name, n)], self.real)

    def store(self, name: str, n: int) -> None:
        self.hbm[name][self.grid.block(name, n)] = self.sram[name]

    def zero(self, name: str, n: int) -> None:
        block = self.hbm[name][self.grid.block(name, n)]
        self.sram[name] = np.zeros(block.shape, self.real)

    def tile(self, at: Tile) -> None:
        raise NotImplementedError

    def make(self, name: str, n: int) -> None:
        raise NotImplementedError


class Forward(Machine):
    """O, m and l are an OnlineSoftmax in SRAM; in HBM, O is normalized. finite: all of O is finite so far."""

    finite = True

    def zero(self, name: str, n: int) -> None:
        rows = self.grid.rows(n)
        self._set_state(OnlineSoftmax.empty(rows.stop - rows.start, self.hbm["O"].shape[1], self.real, self.head.sink))

    def load(self, name: str, n: int) -> None:
        super().load(name, n)
        if name == "O":  # FA1 returns to a block that it wrote before; m and l are loaded already
            self.sram["O"] = self.sram["O"] * self.sram["l"][:, None]

    def tile(self, at: Tile) -> None:
        rows, cols = self.grid.rows(at.i), self.grid.cols(at.j)
        scores = self.head.scores(self.sram["Q"], self.sram["K"], rows, cols, masked=at.kind is Kind.PARTIAL)
        state = self._state()
        P, factor = state.absorb(scores.S)
        kept = self.head.kept(rows, cols, self.real)
        state.O = state.O + guarded_product(P if kept is None else P * kept, self.sram["V"], scores.visible)
        self._set_state(state)
        self.sram |= {"S": scores.S, "P": P, "factor": factor}

    def store(self, name: str, n: int) -> None:
        rows, state = self.grid.rows(n), self._state()
        match name:
            case "O":
                self.hbm["O"][rows] = O = state.normalized()
                self.finite &= bool(np.isfinite(O).all())
            case "L":
                self.hbm["L"][rows] = state.lse()
            case _:
                super().store(name, n)

    def _state(self) -> OnlineSoftmax:
        return OnlineSoftmax(self.sram["m"], self.sram["l"], self.sram["O"])

    def _set_state(self, state: OnlineSoftmax) -> None:
        self.sram |= {"m": state.m, "l": state.l, "O": state.O}


class RowStatistics(Forward):
    """Stores the maximum of each row and the logarithm of its sum separately, for rows whose L is coarse."""

    def store(self, name: str, n: int) -> None:
        if name == "L":
            rows, state = self.grid.rows(n), self._state()
            self.hbm["m"][rows], self.hbm["L"][rows] = state.m, np.log(state.l)


class Backward(Machine):
    """P is recomputed from the scores and L; the forward pass keeps only O and L.

    row_max: subtracted from the scores of a row before L, if L is coarse (softmax.py).
    """

    dbias: Array | None = None
    row_max: Array | None = None

    def tile(self, at: Tile) -> None:
        rows, cols, sram = self.grid.rows(at.i), self.grid.cols(at.j), self.sram
        scale = self.real(self.head.problem.scale)
        scores = self.head.scores(sram["Q"], sram["K"], rows, cols, masked=at.kind is Kind.PARTIAL)
        S = scores.S if self.row_max is None else scores.S - self.row_max[rows, None]
        P = np.exp(S - sram["L"][:, None])  # eq. 9
        kept = self.head.kept(rows, cols, self.real)
        dP = sram["dO"] @ sram["V"].T  # eq. 11
        dropped = P
        if kept is not None:
            dropped, dP = P * kept, dP * kept
        dS = P * (dP - sram["D"][:, None])  # eq. 12
        visible = scores.visible
        if visible is not None:  # 0 already, unless a NaN in the row reached L or D
            dropped, dS = np.where(visible, dropped, self.real(0)), np.where(visible, dS, self.real(0))
        if self.dbias is not None:
            self.head.add_pairs(self.dbias, dS, rows, cols)
        if scores.slope is not None:
            dS = dS * scores.slope
        seen_by = None if visible is None else visible.T
        sram["dV"] = sram["dV"] + guarded_product(dropped.T, sram["dO"], seen_by)  # eq. 10
        sram["dQ"] = sram["dQ"] + guarded_product(dS, sram["K"], visible) * scale  # eq. 13
        sram["dK"] = sram["dK"] + guarded_product(dS.T, sram["Q"], seen_by) * scale  # eq. 14
        sram |= {"S": scores.S, "P": P, "dP": dP, "dS": dS}


class Standard(Machine):
    """Standard attention in three kernels, for comparison: S and P are whole in HBM, and a block has whole rows."""

    def make(self, name: str, n: int) -> None:
        rows, cols, sram = self.grid.rows(n), slice(0, self.grid.n_k), self.sram
        match name:
            case "S":
                sram["S"] = self.head.scores(sram["Q"], sram["K"], rows, cols, masked=True).S
            case "P":
                state = OnlineSoftmax.empty(rows.stop - rows.start, 0, self.real, self.head.sink)
                P, _ = state.absorb(sram["S"])
                sram["P"] = P / np.where(state.l == 0, 1, state.l)[:, None]
                self.hbm["L"][rows] = state.lse()
            case "O":
                kept = self.head.kept(rows, cols, self.real)
                P = sram["P"] if kept is None else sram["P"] * kept
                sram["O"] = guarded_product(P, sram["V"], self.head.visible(rows, cols, masked=True))


def forward(
    problem: Problem,
    order: str = "fa2",
    block_q: int = BLOCK,
    block_k: int = BLOCK,
    observe: Observer | None = None,
) -> tuple[Array, Array]:
    """Return output and lse, rank 4 and 3, in accumulator precision."""
    out, lse, finite = _forward(problem, order, block_q, block_k, observe)
    if not finite:  # a sum may have overflowed although the mean is finite: rerun with scaled values
        overflowed = ~np.isfinite(out)
        small = replace(problem, v=widen(problem.v, out.dtype) * out.dtype.type(SHRINK))
        out[overflowed] = _forward(small, order, block_q, block_k)[0][overflowed] / out.dtype.type(SHRINK)
    return out, lse


def _forward(
    problem: Problem, order: str, block_q: int, block_k: int, observe: Observer | None = None
) -> tuple[Array, Array, bool]:
    """Return output, lse, and whether all of the output is finite."""
    real, finite = np.dtype(problem.accumulator).type, True
    out = np.zeros(problem.out_shape(), real)
    lse = np.zeros(problem.out_shape()[:-1], real)
    for head in heads(problem):
        grid = Grid(head.n_q, head.n_k, block_q, block_k)
        hbm = {"O": head.queries(out), "L": head.queries(lse)}
        if order == "fa1":  # O, m and l start in HBM; L comes from the final m and l
            start = OnlineSoftmax.empty(head.n_q, 0, real, head.sink)
            hbm |= {"m": start.m, "l": start.l}
        machine = Forward(head, grid, real, hbm)
        machine.run(schedule.FORWARD[order](head.visible_by, grid), observe)
        if order == "fa1":
            hbm["L"][...] = OnlineSoftmax(hbm["m"], hbm["l"], hbm["O"]).lse()
        finite &= machine.finite
    return out, lse, finite


def standard(problem: Problem, block_q: int = BLOCK, observe: Observer | None = None) -> tuple[Array, Array]:
    """Compute the same results with three kernels and two n x n matrices, a block of rows at a time."""
    real = np.dtype(problem.accumulator).type
    out = np.zeros(problem.out_shape(), real)
    lse = np.zeros(problem.out_shape()[:-1], real)
    for head in heads(problem):
        grid = Grid(head.n_q, head.n_k, block_q, max(head.n_k, 1))
        S, P = (np.zeros((head.n_q, head.n_k), real) for _ in range(2))
        hbm = {"S": S, "P": P, "O": head.queries(out), "L": head.queries(lse)}
        machine = Standard(head, grid, real, hbm)
        machine.run(schedule.standard_forward(grid), observe)
    return out, lse


@np.errstate(**QUIET)
def backward(
    problem: Problem,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    block_q: int = BLOCK,
    block_k: int = BLOCK,
    observe: Observer | None = None,
    *,
    bias_grad: bool = True,
    target: Target | None = None,
) -> Grads:
    """Compute gradients from the saved output and lse, rank 4, in accumulator precision.

    With a target, out and lse may be those of attention to more keys.
    """
    real = np.dtype(problem.accumulator).type
    dq, dk, dv = (np.zeros(x.shape, real) for x in (problem.q, problem.k, problem.v))
    dbias = None if problem.bias is None or not bias_grad else np.zeros(problem.bias.shape, real)
    dsink = None if problem.sink is None else np.zeros(problem.sink.shape, real)
    for head in heads(problem):
        grid = Grid(head.n_q, head.n_k, block_q, block_k)
        L, row_max = _statistics(head, grid, head.queries(lse), target is not None)
        hbm = {
            "dO": head.queries(dout),
            "L": np.where(np.isneginf(L), real(np.inf), L),  # an empty row: exp(S - inf) makes its weights 0
            "D": _delta(head, grid, dout, out, lse, dlse, real),
            "dQ": head.queries(dq),
            "dK": head.keys(dk),
            "dV": head.keys(dv),
        }
        machine = Backward(head, grid, real, hbm)
        machine.dbias, machine.row_max = dbias, row_max
        machine.run(schedule.backward(head.visible_by, grid, head.first_of_group), observe)
        if dsink is not None and head.sink is not None:
            above = head.sink if row_max is None else head.sink - row_max
            dsink[head.head] -= (np.exp(above - pivot(L)) * hbm["D"]).sum()
    return Grads(dq, dk, dv, dbias, dsink)


def _statistics(head: Head, grid: Grid, lse: Array, shared: bool) -> tuple[Array, Array | None]:
    """Return L and its row_max, which is None if no lse is coarse. shared: of more keys, L is the given lse itself."""
    if not any(is_coarse(lse[grid.rows(i)]).any() for i in range(grid.shape[0])):
        return lse, None
    coarse = is_coarse(lse)
    no_values = lse[:, None][:, :0]
    hbm = {"V": head.keys(head.problem.v)[:, :0], "O": no_values, "m": np.zeros_like(lse), "L": np.zeros_like(lse)}
    RowStatistics(head, grid, lse.dtype.type, hbm).run(schedule.fa2_forward(head.visible_by, grid))
    if shared:
        coarse &= is_own(lse, hbm["m"] + hbm["L"])
    return np.where(coarse, hbm["L"], lse), np.where(coarse, hbm["m"], lse.dtype.type(0))


def _delta(head: Head, grid: Grid, dout: Array, out: Array, lse: Array, dlse: Array | None, real: Any) -> Array:
    """D = rowsum(dO * O) - dL, a block of rows at a time; 0 for an empty row."""
    D = np.zeros(head.n_q, real)
    for i in range(grid.shape[0]):
        rows = grid.rows(i)
        D[rows] = (widen(head.queries(dout)[rows], real) * widen(head.queries(out)[rows], real)).sum(axis=1)
    if dlse is not None:
        D = D - head.queries(dlse)
    return np.where(np.isneginf(head.queries(lse)), real(0), D)


def prepare(problem: Problem, arrays: Arrays) -> tuple[Once, Inputs]:
    return Once(sys.modules[__name__], problem, arrays), Inputs.of(problem)
