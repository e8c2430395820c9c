"""Portable GPU kernels in Triton: forward, backward and split-key decode, with every option."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from flashtile import machine
from flashtile.problem import Problem
from flashtile.tiling import Tiling

if TYPE_CHECKING:
    from flashtile.backends.triton.passes import Prepared

LONGEST = 1 << 28


@cache
def missing() -> str | None:
    """Why these kernels cannot run on this machine; None where they can."""
    if reason := machine.lacks("torch", "triton") or machine.too_old("torch") or machine.too_old("triton"):
        return reason
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def why_not(problem: Problem) -> str | None:
    """What these kernels do not do."""
    if max(problem.n_q, problem.n_k) > LONGEST:
        return f"sequences of more than {LONGEST} do not fit its 32-bit positions"
    if problem.dtype == "float64" and max(problem.dim, problem.dim_v) > 256:
        return "tiles of float64 with head dims over 256 do not fit in shared memory"
    return None


def tile(problem: Problem, capability: tuple[int, int] | str | None = None) -> Tiling:
    """That of a forward pass on such a GPU."""
    from flashtile.backends.triton import tuning

    config, heads = tuning.forward(problem, capability)
    return Tiling(max(1, config.block_q // heads), config.block_k, min(heads, config.block_q))


def prepare(problem: Problem) -> tuple[Prepared, Problem]:
    """Its launches, for this problem and all that differ from it in numbers alone; and the problem as they want it.

    No atomics: gradients have the same bits on every run, whatever `deterministic` says.
    """
    from flashtile.backends.triton.passes import Prepared
    from flashtile.backends.triton.tensors import laid_out

    problem = laid_out(problem)
    return Prepared(problem), problem
