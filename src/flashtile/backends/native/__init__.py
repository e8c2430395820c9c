"""The C++ core: the fast CPU backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtile.backends.native.blocks import tile
from flashtile.backends.native.library import why_not as missing
from flashtile.inputs import Inputs

if TYPE_CHECKING:
    from flashtile.backends.native.runner import Runner
    from flashtile.host.arrays import Arrays
    from flashtile.problem import Problem

__all__ = ["missing", "prepare", "tile"]


def prepare(problem: Problem, arrays: Arrays) -> tuple[Runner, Inputs]:
    """A runner, and the inputs of this call; others may follow unless something had to be copied.

    Packed sequences may differ in their lengths from call to call, and empty arrays may lie nowhere.
    """
    from flashtile.backends.native.runner import Runner, laid_out

    p = laid_out(problem)
    reusable = p is problem and not p.packed and bool(p.q.size and p.k.size and p.v.size)
    return Runner(p, arrays, reusable), Inputs.of(p)
