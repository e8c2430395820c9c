"""Calls of CPU tensors, viewed as NumPy arrays."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile import dispatch
from flashtile.checks.options import check_seed_tensor
from flashtile.inputs import Inputs
from flashtile.options import ARRAYS
from flashtile.problem import describe
from flashtile.pytorch.bridge import TORCH, to_numpy
from flashtile.pytorch.operands import seed_value


def prepare(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Any, Inputs]:
    """Return a runner for this call, and its inputs, as Backend.prepare() does."""
    original, options = options, options.copy()
    try:
        for name in ARRAYS:
            if (x := options.get(name)) is not None:
                options[name] = to_numpy(x)
        arrays = to_numpy(q), to_numpy(k), to_numpy(v)
    except TypeError:  # a dtype that NumPy lacks
        describe(q, k, v, **original)  # raises an error that names the argument
        raise
    if isinstance(seed := options.get("seed"), Tensor):
        check_seed_tensor(seed, q)
        options["seed"] = seed_value(seed)
    problem = describe(*arrays, **options)
    return dispatch.choose(problem, backend, "cpu", tensors=True).prepare(problem, TORCH)
