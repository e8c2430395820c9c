"""What the Triton and the Gluon backend share: launches, results, rows of a pass, and what NaN and Inf spoil."""

from __future__ import annotations

from functools import cache

from flashtile.host import machine
from flashtile.problem import Problem

LONGEST = 1 << 28


@cache
def missing() -> str | None:
    """Why no kernel of Triton's can run on this machine; None where they can."""
    if reason := machine.lacks("torch", "triton") or machine.too_old("torch") or machine.too_old("triton"):
        return reason
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def why_not(problem: Problem) -> str | None:
    """What neither backend does."""
    if max(problem.n_q, problem.n_k) > LONGEST:
        return f"sequences of more than {LONGEST} do not fit its 32-bit positions"
    if problem.dtype == "float64" and max(problem.dim, problem.dim_v) > 256:
        return "tiles of float64 with head dims over 256 do not fit in shared memory"
    return None
