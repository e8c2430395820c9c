"""The forward and backward pass of a call by the portable kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashtile.backends.gpu.passes import Passes
from flashtile.backends.gpu.tensors import aligned
from flashtile.backends.triton.backward import Backward
from flashtile.backends.triton.forward import Forward
from flashtile.problem import Problem
from flashtile.results import Grads


class Runner(Passes):
    """Runs calls like this one, on any numbers."""

    def __init__(self, problem: Problem, reusable: bool = True) -> None:
        super().__init__(problem, reusable)
        self.forward = Forward(self._problem, self._device, self._aligned)

    def _prepare_backward(
        self, given: tuple[Any, ...], outlines: tuple[Any, ...], bias_grad: bool, dtype: str | None
    ) -> Callable[..., Grads]:
        is_aligned = self._aligned | {"dout": aligned(given[0])}
        return Backward(self._problem, self._device, is_aligned, outlines, bias_grad, dtype)
