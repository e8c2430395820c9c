"""The forward and backward pass of a call by the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashtile.backends.gluon.backward import Backward
from flashtile.backends.gluon.forward import Forward
from flashtile.backends.gpu.passes import Passes
from flashtile.backends.gpu.tensors import aligned
from flashtile.backends.triton.backward import Backward as PortableBackward
from flashtile.problem import Problem
from flashtile.results import Grads


class Runner(Passes):
    """Runs calls like this one, on any numbers."""

    def __init__(self, problem: Problem, reusable: bool = True) -> None:
        super().__init__(problem, reusable)
        self.forward = Forward(self._problem, self._device)

    def _tidied(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        dout = given[0].contiguous()
        if not aligned(dout):  # the copy engine fetches it
            dout = dout.clone()
        return super()._tidied((dout, *given[1:]))

    def _prepare_backward(
        self, given: tuple[Any, ...], outlines: tuple[Any, ...], bias_grad: bool, dtype: str | None
    ) -> Callable[..., Grads]:
        if dtype not in (None, self._problem.dtype):  # these kernels store 16 bits
            is_aligned = self._aligned | {"dout": aligned(given[0])}
            return PortableBackward(self._problem, self._device, is_aligned, outlines, bias_grad, dtype)
        return Backward(self._problem, self._device, outlines, may_share=dtype is not None)
