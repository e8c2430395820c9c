"""Passes by the Hopper kernels; the gradients of some calls are left to the portable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashtile.backends.gluon import tuning
from flashtile.backends.gluon.gradients import Backward
from flashtile.backends.gluon.output import Forward
from flashtile.backends.triton.passes import Passes
from flashtile.backends.triton.tensors import aligned
from flashtile.problem import Problem
from flashtile.results import Grads


class Prepared(Passes):
    """By the Hopper kernels."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._forward = Forward(self._problem, self._device)
        self._differentiates = differentiates(problem)

    def _tidied(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._differentiates:
            dout = given[0].contiguous()
            if not aligned(dout):  # the copy engine fetches it
                dout = dout.clone()
            given = (dout, *given[1:])
        return super()._tidied(given)

    def _differentiate(
        self, given: tuple[Any, ...], outlines: tuple[Any, ...], bias_grad: bool
    ) -> Callable[..., Grads]:
        if self._differentiates:
            return Backward(self._problem, self._device, outlines)
        return super()._differentiate(given, outlines, bias_grad)


def differentiates(p: Problem) -> bool:
    """Whether the backward kernels here do this problem."""
    width = max(p.dim, p.dim_v)
    if width > 128 and p.softcap:  # two warpgroups share the scores of a tile, and one would need softcap's slope
        return False
    return width <= tuning.WIDEST_BACKWARD and p.dim % 8 == p.dim_v % 8 == 0
