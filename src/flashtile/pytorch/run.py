"""Run a call below autograd, from an operator or without one: find its runner, and return tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.problem import describe
from flashtile.pytorch import calls, eight_bits
from flashtile.pytorch.interception import check_storage, skip_dynamo
from flashtile.pytorch.operands import named_tensors
from flashtile.results import Target


@skip_dynamo
def forward(
    q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any], with_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """Return output and lse, contiguous, in the layout of q. The lse is undefined unless with_lse."""
    entry = None
    if not (q.is_cpu and q.dtype is eight_bits.DTYPE):  # no CPU backend multiplies these
        entry, inputs = calls.find_or_prepare(q, k, v, backend, options)
    if entry is None:
        return _widened(q, k, v, backend, options)
    results: tuple[Tensor, Tensor] = entry.runner.forward(inputs, with_lse)
    return results


def _widened(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """forward() of 8-bit tensors for a backend that does not multiply them directly."""
    check_storage(named_tensors(q, k, v, options))
    problem = describe(q, k, v, **options)
    (q, k, v), changed = eight_bits.widened(problem)
    out, lse = forward(q, k, v, backend, {**options, **changed})
    return out.to(getattr(torch, problem.out_dtype)), lse


@skip_dynamo
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
    target: Target | None = None,
) -> calls.Grads:
    """Return dq, dk, dv, dbias, dsink, each with its input's shape and dtype, or as the target says, or None."""
    entry, inputs = calls.find_or_prepare(q, k, v, backend, options)
    assert entry is not None, "8-bit tensors have no gradients"
    return entry.run_backward(inputs, options, dout, dlse, out, lse, bias_grad, target)
