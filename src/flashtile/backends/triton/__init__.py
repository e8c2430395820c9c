"""Portable GPU kernels in Triton: forward, backward and split-key decode, with every option."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from flashtile.problem import Problem
from flashtile.results import Gradients

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
    """What these kernels do not do yet."""
    if max(problem.n_q, problem.n_k) > LONGEST:
        return f"sequences of more than {LONGEST} do not fit its 32-bit positions"
    if problem.dropout and problem.dtype in ("float16", "bfloat16") and max(problem.dim, problem.dim_v) > 128:
        return "dropout in 16 bits with head dims over 128 is not there yet"
    return None


def forward(problem: Problem) -> tuple[Any, Any]:
    """Output and lse, rank 4 and 3, on the device of q."""
    from flashtile.backends.triton import launch

    return launch.forward(problem)


def backward(problem: Problem, dout: Any, out: Any, lse: Any, dlse: Any, *, bias_grad: bool = True) -> Gradients:
    """Gradients on the device of q. No atomics: the same bits on every run, whatever `deterministic` says."""
    from flashtile.backends.triton import launch

    return launch.backward(problem, dout, out, lse, dlse, bias_grad=bias_grad)
