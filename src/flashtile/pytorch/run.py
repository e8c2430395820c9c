"""What the operators run: describe the call, let the dispatch table choose a backend, give tensors back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import check_stored
from flashtile.numerics.dtypes import name_of, narrow
from flashtile.problem import check_gradients, describe
from flashtile.pytorch import calls, eight_bits, on_cpu
from flashtile.pytorch.bridge import Memory, to_numpy, to_torch
from flashtile.pytorch.interception import left_alone
from flashtile.pytorch.operands import tensors_of

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@left_alone
def again(known: calls.Known, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: dict[str, Any]) -> Any:
    """Output, and lse if asked for, of a call like one that is known."""
    inputs = known.inputs(q, k, v, options)
    return known.run.forward(inputs) if return_lse else known.run.output(inputs)


@left_alone
def forward(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and lse, contiguous, in the layout of q."""
    run, inputs = _found(q, k, v, backend, options)
    if run is None:
        return _widened(q, k, v, backend, options)
    results: tuple[Tensor, Tensor] = run.forward(inputs)
    return results


@left_alone
def output(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> Tensor:
    """The output alone: a small call notices what the tensor of an lse nobody wants costs."""
    run, inputs = _found(q, k, v, backend, options)
    if run is None:
        return _widened(q, k, v, backend, options)[0]
    result: Tensor = run.output(inputs)
    return result


def _found(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """prepared.find(); on a CPU no backend multiplies 8-bit tensors as they are, and nobody needs to be asked."""
    if q.is_cpu and q.dtype is eight_bits.DTYPE:
        return None, None
    return calls.find(q, k, v, backend, options)


def _widened(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """forward() of 8-bit tensors where the backend does not multiply them as they are."""
    check_stored(tensors_of(q, k, v, options))
    problem = describe(q, k, v, **options)
    (q, k, v), more = eight_bits.widened(problem)
    out, lse = forward(q, k, v, backend, {**options, **more})
    return out.to(getattr(torch, problem.out_dtype)), lse


@left_alone
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_grad: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str,
    options: dict[str, Any],
) -> Grads:
    """dq, dk, dv, dbias, dsink, each contiguous and like its input; None where there is none to give."""
    named = {"dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        named["dlse"] = dlse
    check_stored(named)
    if not q.is_cpu:
        run, inputs = calls.find(q, k, v, backend, options)
        grads = run.backward(inputs, dout, out, lse, dlse, bias_grad=bias_grad)
        dq, dk, dv = grads[:3]
    else:
        check_stored(tensors_of(q, k, v, options))
        problem, row = on_cpu.chosen(q, k, v, backend, options)
        given = (None if x is None else to_numpy(x) for x in (dout, out, lse, dlse))
        grads = row.backward(problem, *check_gradients(problem, *given), bias_grad=bias_grad, memory=Memory)
        dq, dk, dv = (on_cpu.given(problem, x, problem.dtype) for x in grads[:3])
    return dq, dk, dv, _like(options.get("bias"), grads.dbias), _like(options.get("sink"), grads.dsink)


def _like(given: Tensor | None, grad: Any) -> Tensor | None:
    if given is None or grad is None:
        return None
    if isinstance(grad, Tensor):
        return grad.to(given.dtype).reshape(given.shape)
    return to_torch(narrow(grad, name_of(given.dtype))).reshape(given.shape)
