"""torch's own attention on a CPU (SDPA), for tensors where there is no C++ core: many times as fast as NumPy."""

from __future__ import annotations

from functools import cache

from flashtile.backends.once import Once
from flashtile.cost.tiling import Tiling
from flashtile.host import machine
from flashtile.host.arrays import Arrays
from flashtile.inputs import Inputs
from flashtile.problem import Problem

KEYS = 512  # that torch has in a tile, and the rows of one for so many queries
ROWS = ((768, 256), (192, 64), (0, 32))


@cache
def missing() -> str | None:
    """Why torch cannot run on this machine; None where it can. It is not imported."""
    if not machine.has("torch"):
        return "torch is not installed; run: pip install torch"
    return machine.too_old("torch")


def why_not(problem: Problem) -> str | None:
    """What torch's kernel does not do, or not as exactly as it is done here."""
    p = problem
    if p.packed:
        return "it takes no packed sequences"
    if p.scale <= 0:
        return "it takes a positive scale"
    if not (p.q.size and p.k.size):
        return "it takes at least one query and one key"
    band = p.band_for(p.n_q, p.n_k)
    if band.begin(p.n_q - 1) > 0:
        return "it takes no window"
    if band.end(p.n_q - 1) <= 0:
        return "it takes no band in which nobody sees a key"
    return None


def tile(problem: Problem, capability: object = None) -> Tiling:
    """As torch's source has it."""
    return Tiling(next(rows for least, rows in ROWS if problem.n_q >= least), KEYS)


def prepare(problem: Problem, arrays: Arrays) -> tuple[Once, Inputs]:
    """A runner of this one call."""
    from flashtile.backends.sdpa import passes

    return Once(passes, problem, arrays), Inputs.of(problem)
