"""Once: a runner for backends that run a Problem without preparation."""

from types import ModuleType
from typing import Any

from flashtile.checks.shapes import check_gradients
from flashtile.host.arrays import Arrays
from flashtile.host.memory_order import of_caller
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import name_of, narrow
from flashtile.problem import Problem
from flashtile.results import Grads, Target


class Once:
    """Runs one call, by a module's forward() and backward() on NumPy arrays."""

    __slots__ = ("_arrays", "_module", "_problem")
    reusable = False
    alignment = 1

    def __init__(self, module: ModuleType, problem: Problem, arrays: Arrays) -> None:
        self._module, self._problem, self._arrays = module, problem, arrays

    def forward(self, x: Inputs, with_lse: bool = True) -> tuple[Any, Any]:
        p = self._problem
        out, lse = self._module.forward(p)
        return self._to_caller(out, p.out_dtype, p.q), self._to_caller(lse, p.accumulator)

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
        p, to_numpy = self._problem, self._arrays.to_numpy
        arrays = (None if y is None else to_numpy(y) for y in (dout, out, lse, dlse))
        grads = self._module.backward(p, *check_gradients(p, *arrays), bias_grad=bias_grad, target=target)
        dtype, into = target or Target(p.dtype)
        dq, dk, dv = (
            self._to_caller(y, dtype, like) if buffer is None else self._arrays.add(buffer, p.in_caller_layout(y))
            for y, like, buffer in zip(grads[:3], (p.q, p.k, p.v), into, strict=False)
        )
        dbias, dsink = (None if y is None else self._arrays.from_numpy(y) for y in grads[3:])
        return Grads(dq, dk, dv, dbias, dsink)

    def _to_caller(self, x: Any, dtype: str, like: Any = None) -> Any:
        """Convert a result to the caller's layout, dtype and library, and to the order in memory of `like`, rank 4."""
        p = self._problem
        order = None if like is None else of_caller(p.order_of(like), p.rank, p.packed)
        x = narrow(x, dtype)
        if dtype == "bfloat16" and name_of(p.q.dtype) == dtype:
            x = x.view(p.q.dtype)
        return self._arrays.from_numpy(p.in_caller_layout(x), order)
