"""The sentences of the viewer: what each event did, and how it changed the row under the lens."""

from typing import Any

import numpy as np

from flashtile.band import Kind
from flashtile.numerics.schedule import STANDARD, Event, Grid, Launch, Load, Make, Store, Tile, Zero
from flashtile.numerics.visibility import Visible

START = "Nothing has moved yet. Press play."
MADE = {"S": "scores, Q K\u1d40", "P": "weights, the softmax of S", "O": "output, P V"}

# Templates for the numbers of one row at one tile.
LENS = {
    "waiting": "Row {row} has seen no key yet: m is \u2212\u221e, l and O are 0.",
    "never": "Row {row} sees no key at all: its output is 0.",
    "first": "Row {row} meets its first keys: m is their largest score, {m}, and there is nothing to rescale.",
    "bigger": "Key {key} scores {m}, more than {m_old}: the sums so far are multiplied by "
    "exp({m_old} \u2212 {m}) = {factor}.",
    "same": "No score here exceeds {m}: the factor is 1, and the new weights are simply added.",
    "hidden": "Row {row} may see none of these keys: m, l and O stay as they are.",
    "S": "All {n} scores of row {row} are computed at once and written to HBM.",
    "P": "The scores of row {row} are read from HBM, become weights, and are written to HBM.",
    "O": "The weights of row {row} are read from HBM: the output is the average of the values, weighted by them.",
    "none": "Nothing of row {row} has been computed yet.",
    "recomputed": "The weights of row {row} are recomputed from its scores, exp(S \u2212 L) with L = {L}: none was "
    "kept. Those seen so far add up to {sum}.",
    "unseen": "Row {row} may see none of these keys: they add nothing to its dQ.",
    "cuts": "The tiles of row {row}: {cuts}.",
    "cut": "begin {begin}, full from {full_begin} to {full_end}, end {end}",
    "no_gradient": "Row {row} has accumulated nothing yet: its dQ is 0.",
}


def caption(event: Event, grid: Grid, visible: Visible, moved: int, times: int) -> str:
    """One sentence. `moved`: bytes through HBM; `times`: how often this block has been stored, including now."""
    match event:
        case Load(name, n):
            return f"{_block(name, n, grid)} is read from HBM: {moved:,}\u00a0B."
        case Zero("O", n):
            return f"O, m and l of block {n} start in SRAM as 0, \u2212\u221e and 0; nothing is read."
        case Zero(name, n):
            return f"{name} of block {n} starts in SRAM as 0; nothing is read."
        case Tile(i, j, kind):
            return _tile(grid, visible, i, j, kind)
        case Store(name, n):
            repeated = "" if times == 1 else f", for the {_ordinal(times)} time"
            return f"{_block(name, n, grid)} is written to HBM{repeated}: {moved:,}\u00a0B."
        case Launch(name):
            at = [launch.name for launch in STANDARD].index(name) + 1
            return f"Kernel {at} of {len(STANDARD)}, {name}, starts with nothing in SRAM."
        case Make(name, n):
            rows = grid.rows(n)
            return f"{name} of queries {_span(rows)} is computed: the {MADE[name]}."


def _tile(grid: Grid, visible: Visible, i: int, j: int, kind: Kind) -> str:
    rows, cols = grid.rows(i), grid.cols(j)
    met = f"Queries {_span(rows)} meet keys {_span(cols)}"
    pairs = (rows.stop - rows.start) * (cols.stop - cols.start)
    if kind is Kind.FULL:
        return f"{met}: all {pairs} pairs count, no mask."
    seen = visible.keep(np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)[None]).sum()
    if seen == pairs:
        return f"{met}: the tile is ragged, and all {pairs} pairs in it count."
    return f"{met}: {seen} of {pairs} pairs count, the mask hides the rest."


def _block(name: str, n: int, grid: Grid) -> str:
    return f"{name} of {'keys' if name in ('K', 'V', 'dK', 'dV') else 'queries'} {_span(grid.block(name, n))}"


def _span(s: slice) -> str:
    return f"{s.start}" if s.stop - s.start == 1 else f"{s.start} to {s.stop - 1}"


def _ordinal(n: int) -> str:
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n, 'th') }"


def filled(case: str, **values: Any) -> str:
    """Fill in the numbers of a sentence of LENS."""
    return LENS[case].format(**values)
