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
    """Return a runner and the inputs of this call. The runner is reusable unless an array had to be copied.

    Runners of packed sequences are not, because lengths may change, nor those of empty arrays, which have no address.
    """
    from flashtile.backends.native.runner import Runner, laid_out

    p = laid_out(problem)
    reusable = p is problem and not p.packed and bool(p.q.size and p.k.size and p.v.size)
    orders = [problem.order_of(x) for x in (problem.q, problem.k, problem.v)]
    return Runner(p, arrays, reusable, orders), Inputs.of(p)
