"""What the operators run: describe the call, let the dispatch table choose a backend, give tensors back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import dispatch, threads
from flashtile.dtypes import name_of, narrow
from flashtile.problem import Problem, check_gradients, describe
from flashtile.pytorch import eight_bits, prepared
from flashtile.pytorch.bridge import to_numpy, to_torch
from flashtile.pytorch.call import TENSORS
from flashtile.pytorch.watch import left_alone

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@left_alone
def again(known: prepared.Known, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: dict[str, Any]) -> Any:
    """Output, and lse if asked for, of a call like one that is known."""
    inputs = known.inputs(q, k, v, options)
    return known.run.forward(inputs) if return_lse else known.run.output(inputs)


@left_alone
def forward(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and lse, contiguous, in the layout of q."""
    if not q.is_cpu:
        run, inputs = prepared.find(q, k, v, backend, options)
        if run is not None:
            results: tuple[Tensor, Tensor] = run.forward(inputs)
            return results
    if q.dtype is eight_bits.DTYPE:
        return _widened(q, k, v, backend, options)
    problem, out, lse = _run(q, k, v, backend, options)
    return _given(problem, out, problem.out_dtype), _given(problem, lse, problem.accumulator)


@left_alone
def output(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> Tensor:
    """The output alone: a small call notices what the tensor of an lse nobody wants costs."""
    if not q.is_cpu:
        run, inputs = prepared.find(q, k, v, backend, options)
        if run is not None:
            result: Tensor = run.output(inputs)
            return result
    if q.dtype is eight_bits.DTYPE:
        return _widened(q, k, v, backend, options)[0]
    problem, out, _ = _run(q, k, v, backend, options)
    return _given(problem, out, problem.out_dtype)


def _widened(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """forward() of 8-bit tensors where the backend does not multiply them as they are."""
    problem = describe(q, k, v, **options)
    (q, k, v), more = eight_bits.widened(problem)
    out, lse = forward(q, k, v, backend, {**options, **more})
    return out.to(getattr(torch, problem.out_dtype)), lse


def _run(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Problem, Any, Any]:
    problem, row = _chosen(q, k, v, backend, options)
    return problem, *row.forward(problem)


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
    if not q.is_cpu:
        run, inputs = prepared.find(q, k, v, backend, options)
        grads = run.backward(inputs, dout, out, lse, dlse, bias_grad=bias_grad)
        dq, dk, dv = grads[:3]
    else:
        problem, row = _chosen(q, k, v, backend, options)
        given = (None if x is None else to_numpy(x) for x in (dout, out, lse, dlse))
        grads = row.backward(problem, *check_gradients(problem, *given), bias_grad=bias_grad)
        dq, dk, dv = (_given(problem, x, problem.dtype) for x in grads[:3])
    return dq, dk, dv, _like(options.get("bias"), grads.dbias), _like(options.get("sink"), grads.dsink)


def _chosen(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Problem, dispatch.Backend]:
    """Of a call on the CPU, whose tensors are seen as NumPy arrays."""
    given, options = options, options.copy()
    try:
        for name in TENSORS:
            if (x := options.get(name)) is not None:
                options[name] = to_numpy(x)
        arrays = to_numpy(q), to_numpy(k), to_numpy(v)
    except TypeError:  # a dtype that NumPy lacks
        describe(q, k, v, **given)  # says whose it is
        raise
    if options.get("threads") is None:
        options["threads"] = threads.asked_for() or torch.get_num_threads()
    problem = describe(*arrays, **options)
    return problem, dispatch.choose(problem, backend, "cpu")


def _given(problem: Problem, x: Any, dtype: str) -> Tensor:
    """A backend's result as a contiguous tensor in the caller's layout."""
    return to_torch(problem.as_given(narrow(x, dtype)))


def _like(given: Tensor | None, grad: Any) -> Tensor | None:
    if given is None or grad is None:
        return None
    if isinstance(grad, Tensor):
        return grad.to(given.dtype).reshape(given.shape)
    return to_torch(narrow(grad, name_of(given.dtype))).reshape(given.shape)
