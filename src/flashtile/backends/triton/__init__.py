"""Portable GPU kernels in Triton: forward, backward and split-key decode, with every option."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashtile.backends.gpu import missing, why_not
from flashtile.cost.tiling import Tiling
from flashtile.inputs import Inputs
from flashtile.problem import Problem
from flashtile.results import Grads

if TYPE_CHECKING:
    from flashtile.backends.triton.passes import Runner

__all__ = ["missing", "prepare", "prepare_backward", "tile", "why_not"]


def tile(problem: Problem, capability: tuple[int, int] | str | None = None) -> Tiling:
    """The tile of a forward pass on such a GPU."""
    from flashtile.backends.triton import tuning

    config, heads = tuning.forward(problem, capability)
    return Tiling(max(1, config.block_q // heads), config.block_k, min(heads, config.block_q))


def prepare(problem: Problem, arrays: Any = None) -> tuple[Runner, Inputs]:
    """Prepare the launches of this problem, and return them with its inputs, laid out as they need them.

    The kernels use no atomics: gradients have the same bits on every run, whatever `deterministic` says.
    """
    from flashtile.backends.gpu.tensors import laid_out
    from flashtile.backends.triton.passes import Runner

    p = laid_out(problem)
    return Runner(p, reusable=p is problem), Inputs.of(p)


def prepare_backward(*arguments: Any) -> Callable[..., Grads]:
    """Prepare the launches of a backward pass alone, for a backend whose own kernels lack it. See Backward."""
    from flashtile.backends.triton.backward import Backward

    return Backward(*arguments)
