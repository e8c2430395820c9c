"""attention_backward() on tensors: a runner, or the operator where something has to see the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from flashtile.checks.target import check_buffer, check_buffers, check_distinct, check_target
from flashtile.errors import UnsupportedError
from flashtile.problem import describe
from flashtile.pytorch import operators, run, subclasses
from flashtile.pytorch.bridge import to_numpy
from flashtile.pytorch.interception import can_skip_dispatcher, check_storage, reject_shards, skip_dynamo
from flashtile.pytorch.operands import named_tensors, operands, resolve_seed
from flashtile.results import Grads


def attention_backward(
    given: dict[str, Any], backend: str, options: dict[str, Any], grad_dtype: Any, into: Any
) -> Grads:
    """Run flashtile.attention_backward() on tensors of one device. given: dout, q, k, v, out, lse and dlse."""
    if torch.are_deterministic_algorithms_enabled() and options.get("deterministic", False) is False:
        options["deterministic"] = True
    inputs = {f"d{name}": x for name, x in (*given.items(), *options.items()) if name in _DIFFERENTIABLE}
    inputs = {name: inputs.get(name) for name in Grads._fields}
    if torch.compiler.is_compiling():
        return _run_operator(given, backend, options, grad_dtype, into, inputs)
    return _run(given, backend, options, grad_dtype, into, inputs)


_DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


@skip_dynamo
def _run(
    given: dict[str, Any], backend: str, options: dict[str, Any], grad_dtype: Any, into: Any, inputs: dict[str, Any]
) -> Grads:
    reject_shards()
    q, k, v = given["q"], given["k"], given["v"]
    if "seed" in options:
        options["seed"] = resolve_seed(options["seed"])
    buffers = check_buffers(into)
    named = {**given, **named_tensors(q, k, v, options), **{f"into.{name}": x for name, x in buffers.items()}}
    named = {name: x for name, x in named.items() if x is not None}
    tensors = [*named.values()]
    subclasses.check_plain(named)
    target = check_target(describe(q, k, v, **options).dtype, grad_dtype, into, inputs)
    _reject_recorded_buffers(buffers)
    if not can_skip_dispatcher(tensors) or (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)):
        return _run_operator(given, backend, options, grad_dtype, into, inputs)
    check_storage(named)
    _check_memory(buffers, given)
    dout, out, lse, dlse = (given[name] for name in ("dout", "out", "lse", "dlse"))
    bias_grad = inputs["dbias"] is not None
    grads = run.backward(dout, dlse, out, lse, bias_grad, q, k, v, backend, options, target)
    increment_version([x for x in buffers.values() if not x.is_inference()])
    return Grads(*grads)


def _run_operator(
    given: dict[str, Any], backend: str, options: dict[str, Any], grad_dtype: Any, into: Any, inputs: dict[str, Any]
) -> Grads:
    """Run the operator, and add its results to the buffers. Its fake checks the tensors of a traced call."""
    q, k, v, dout, out, lse, dlse = (given[name] for name in ("q", "k", "v", "dout", "out", "lse", "dlse"))
    buffers = check_buffers(into)
    target = check_target(_name_of(q.dtype), grad_dtype, into, inputs)
    # Gradients that are added to 16 bits are rounded once, with the sum.
    dtype = target.dtype if into is None else "float64" if q.dtype is torch.float64 else "float32"
    results = operators.BLOCK_BACKWARD(
        dout, dlse, out, lse, inputs["dbias"] is not None, dtype, *operands(q, k, v, backend, options)
    )
    found: list[Any] = []
    for (name, like), grad in zip(inputs.items(), results, strict=True):
        if like is None:
            found.append(None)
        elif name in buffers:
            with torch.no_grad():
                buffers[name].add_(grad)
            found.append(buffers[name])
        else:
            found.append(grad.to(torch.promote_types(like.dtype, getattr(torch, target.dtype))))
    return Grads(*found)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reject_recorded_buffers(buffers: dict[str, Tensor]) -> None:
    for name, x in buffers.items():
        if x.requires_grad:
            raise UnsupportedError(f"into.{name}: expected a tensor that needs no gradient, got one that requires_grad")


def _check_memory(buffers: dict[str, Tensor], inputs: dict[str, Tensor | None]) -> None:
    """Check that the buffers can be added to in place."""
    for name, x in buffers.items():
        check_buffer(name, x, x.stride(), 1, x.data_ptr(), x.element_size())
    if buffers:
        views = {name: to_numpy(x) for name, x in inputs.items() if x is not None}  # also of memory only a GPU reads
        check_distinct(views, {name: to_numpy(x) for name, x in buffers.items()})
