"""Portable GPU kernels in Triton: forward, backward and split-key decode, with every option."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from flashtile.problem import Problem

if TYPE_CHECKING:
    from flashtile.backends.triton.launch import Prepared

LONGEST = 1 << 28


@cache
def missing() -> str | None:
    """Why these kernels cannot run on this machine; None where they can."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def why_not(problem: Problem) -> str | None:
    """What these kernels do not do."""
    if max(problem.n_q, problem.n_k) > LONGEST:
        return f"sequences of more than {LONGEST} do not fit its 32-bit positions"
    return None


def tile(problem: Problem, capability: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """Query rows and keys of a tile, and how many query heads share it."""
    from flashtile.backends.triton import tuning

    config, heads = tuning.forward(problem, capability)
    return max(1, config.block_q // heads), config.block_k, min(heads, config.block_q)


def prepare(problem: Problem) -> Prepared:
    """Its launches, for this problem and all that differ from it in numbers alone.

    No atomics: gradients have the same bits on every run, whatever `deterministic` says.
    """
    from flashtile.backends.triton import launch

    return launch.Prepared(problem)
