"""torch's own attention (SDPA) for CPU tensors without the C++ core: many times as fast as NumPy."""

from functools import cache

from flashtile.backends.once import Once
from flashtile.cost.tiling import Tiling
from flashtile.host import machine
from flashtile.host.arrays import Arrays
from flashtile.inputs import Inputs
from flashtile.problem import Problem

KEYS = 512  # per tile in torch
ROWS = ((768, 256), (192, 64), (0, 32))  # (least number of queries, rows per tile)


@cache
def missing() -> str | None:
    """Why torch cannot run on this machine; None if it can. Does not import torch."""
    if not machine.has("torch"):
        return "torch is not installed; run: pip install torch"
    return machine.too_old("torch")


def why_not(problem: Problem) -> str | None:
    """Why torch's kernel cannot run this problem, or not as exactly."""
    p = problem
    if p.packed:
        return "it takes no packed sequences"
    if p.scale <= 0:
        return "it takes only a positive scale"
    if not (p.q.size and p.k.size):
        return "it takes no empty queries or keys"
    band = p.band_for(p.n_q, p.n_k)
    if band.begin(p.n_q - 1) > 0:
        return "it takes no window"
    if band.end(p.n_q - 1) <= 0:
        return "it takes no band that hides all keys"
    return None


def tile(problem: Problem, capability: object = None) -> Tiling:
    """Tile sizes from torch's source."""
    return Tiling(next(rows for least, rows in ROWS if problem.n_q >= least), KEYS)


def prepare(problem: Problem, arrays: Arrays) -> tuple[Once, Inputs]:
    from flashtile.backends.sdpa import passes

    return Once(passes, problem, arrays), Inputs.of(problem)
