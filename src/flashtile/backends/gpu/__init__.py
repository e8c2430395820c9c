"""What the Triton and Gluon backends share: launches, tensors, rows of a pass, and the handling of NaN and Inf."""

from __future__ import annotations

from functools import cache

from flashtile.host import machine
from flashtile.problem import Problem

MAX_LENGTH = 1 << 28


@cache
def missing() -> str | None:
    """Why Triton kernels cannot run on this machine; None if they can."""
    if reason := machine.lacks("torch", "triton") or machine.too_old("torch") or machine.too_old("triton"):
        return reason
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def why_not(problem: Problem) -> str | None:
    """Why neither backend supports this problem."""
    if max(problem.n_q, problem.n_k) > MAX_LENGTH:
        return f"sequences of more than {MAX_LENGTH} do not fit its 32-bit positions"
    if problem.dtype == "float64" and max(problem.dim, problem.dim_v) > 256:
        return "tiles of float64 with head dims over 256 do not fit in shared memory"
    return None
