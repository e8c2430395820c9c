"""Prepared launches, forward and backward, for all calls that differ only in the contents of their tensors.

The Runner of each backend chooses the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu.arguments import ALIGNED
from flashtile.backends.gpu.tensors import aligned, outline, tidy_gradients
from flashtile.checks.shapes import check_gradients
from flashtile.inputs import TENSORS, Inputs
from flashtile.problem import Problem
from flashtile.results import Grads, Target


class Passes:
    """What a call launches for tensors of these shapes, strides, dtypes and alignments."""

    alignment = ALIGNED  # kernels are specialized on the alignment of pointers

    def __init__(self, problem: Problem, reusable: bool) -> None:
        """reusable: whether the problem is as the caller gave it, so that other calls like it can run this way too."""
        self.reusable = reusable
        self._device = problem.q.device
        self._index = gpu.index_of(self._device)
        seed = problem.seed if isinstance(problem.seed, int) else outline(problem.seed)
        outlines: dict[str, Any] = {name: outline(getattr(problem, name)) for name in TENSORS} | {"seed": seed}
        self._problem = replace(problem, **outlines)
        self._aligned = {name: aligned(getattr(problem, name)) for name in "qkv"}
        # Output and lse, contiguous, in the caller's layout. An lse that is not asked for holds anything.
        self.forward: Callable[..., tuple[Any, Any]]
        self._backwards: dict[Any, tuple[Callable[..., Grads], bool]] = {}

    def backward(
        self,
        x: Inputs,
        dout: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        *,
        bias_grad: bool = True,
        target: Target | None = None,
    ) -> Grads:
        """Return gradients from the saved output and lse, in the caller's layout; those of bias (rank 4) and sink in
        accumulator precision.
        """
        given = (dout, out, lse, dlse)
        run, is_tidy = self._backward_for(given, bias_grad, None if target is None else target.dtype)
        given = given if is_tidy else self._tidied(given)
        if self._index is None or self._index == gpu.current():
            grads = run(x, *given)
        else:
            grads = gpu.on_device(self._index, run, x, *given)
        return grads if target is None else _added(grads, target.into)

    def _backward_for(
        self, given: tuple[Any, ...], bias_grad: bool, dtype: str | None
    ) -> tuple[Callable[..., Grads], bool]:
        """Return what runs a backward pass of tensors laid out like these, and whether they need no copies first.

        dtype: that of a Target, or None.
        """
        dout, out, lse, dlse = given
        key = (bias_grad, dtype, _kind_of(dout), _kind_of(out), _kind_of(lse), None if dlse is None else _kind_of(dlse))
        found = self._backwards.get(key)
        if found is None:
            outlines = check_gradients(self._problem, *map(outline, given))
            tidied = self._tidied(given)
            is_tidy = all(map(operator.is_, tidied, given))
            run = self._prepare_backward(given, outlines, bias_grad, dtype) if is_tidy else None
            if run is None:
                run, _ = self._backward_for(tidied, bias_grad, dtype)
            found = self._backwards[key] = run, is_tidy
        return found

    def _tidied(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """dout, out, lse and dlse, with rows laid out as the kernels need them."""
        return tidy_gradients(self._problem, *given)

    def _prepare_backward(
        self, given: tuple[Any, ...], outlines: tuple[Any, ...], bias_grad: bool, dtype: str | None
    ) -> Callable[..., Grads]:
        """Prepare the launches of a backward pass of tensors like these. dtype: that of a Target, or None."""
        raise NotImplementedError


def _added(grads: Grads, into: Grads) -> Grads:
    """Add dq, dk and dv to their buffers."""
    dq, dk, dv = (x if buffer is None else buffer.add_(x) for x, buffer in zip(grads[:3], into[:3], strict=True))
    return grads._replace(dq=dq, dk=dk, dv=dv)


def _kind_of(x: Any) -> tuple[Any, ...]:
    """What decides the launch: shape, strides, dtype and alignment."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED
