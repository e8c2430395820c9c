"""What the operators run, and eager calls without them: find the runner of a call, and give tensors back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.arguments import check_stored
from flashtile.inputs import Inputs
from flashtile.problem import describe
from flashtile.pytorch import calls, eight_bits
from flashtile.pytorch.interception import left_alone
from flashtile.pytorch.operands import tensors_of

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@left_alone
def forward(
    q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any], with_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """Output and lse, contiguous, in the layout of q. An lse that is not asked for is anything."""
    entry = None
    if not (q.is_cpu and q.dtype is eight_bits.DTYPE):  # no backend on a CPU multiplies these
        entry, inputs = calls.find(q, k, v, backend, options)
    if entry is None:
        return _widened(q, k, v, backend, options)
    results: tuple[Tensor, Tensor] = entry.runner.forward(inputs, with_lse)
    return results


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
    entry, inputs = calls.find(q, k, v, backend, options)
    assert entry is not None, "8-bit tensors have no gradients"
    return differentiate(entry, inputs, options, dout, dlse, out, lse, bias_grad)


@left_alone
def differentiate(
    entry: calls.Entry,
    x: Inputs,
    options: dict[str, Any],
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_grad: bool,
) -> Grads:
    """backward() of a call whose entry is known."""
    grads = entry.runner.backward(x, dout, out, lse, dlse, bias_grad=bias_grad)
    if grads.dbias is None and grads.dsink is None:
        return grads  # type: ignore[no-any-return]
    return (*grads[:3], _like(options.get("bias"), grads.dbias), _like(options.get("sink"), grads.dsink))


def _like(given: Any, grad: Tensor | None) -> Tensor | None:
    return None if given is None or grad is None else grad.to(given.dtype).reshape(given.shape)
