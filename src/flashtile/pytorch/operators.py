"""The operators flashtile::attention, attention_backward and block_backward: schemas, kernels and fakes.

A fake checks the metadata of a call as the kernel does; symbolic numbers are checked when the kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.shapes import check_gradients
from flashtile.host.memory_order import of_caller
from flashtile.problem import Problem, describe
from flashtile.pytorch import run
from flashtile.pytorch.interception import reject_shards
from flashtile.pytorch.operands import SCHEMA, Operands
from flashtile.results import Target

LIBRARY: Any = torch.library.Library("flashtile", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention({SCHEMA}) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool bias_grad, {SCHEMA})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)
# attention_backward() of the package, whose out and lse may be those of attention to more keys.
LIBRARY.define(
    f"block_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool bias_grad, str grad_dtype, {SCHEMA})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)
ATTENTION = torch.ops.flashtile.attention.default
ATTENTION_BACKWARD = torch.ops.flashtile.attention_backward.default
BLOCK_BACKWARD = torch.ops.flashtile.block_backward.default

OutAndLse = tuple[Tensor, Tensor]
FiveGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


# One kernel for all devices: the table in dispatch.py chooses the backend, or says why there is none.
@torch.library.impl(LIBRARY, "attention", "CompositeExplicitAutograd")
def _attention(*args: Any) -> OutAndLse:
    reject_shards()  # also in compiled graphs
    call = Operands(*args)
    return run.forward(call.q, call.k, call.v, call.backend, call.options())


@torch.library.impl(LIBRARY, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, bias_grad: bool, *args: Any
) -> FiveGrads:
    return _run_backward(dout, dlse, out, lse, bias_grad, None, args)


@torch.library.impl(LIBRARY, "block_backward", "CompositeExplicitAutograd")
def _block_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, bias_grad: bool, grad_dtype: str, *args: Any
) -> FiveGrads:
    reject_shards()  # also in compiled graphs
    return _run_backward(dout, dlse, out, lse, bias_grad, Target(grad_dtype), args)


def _run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_grad: bool,
    target: Target | None,
    args: tuple[Any, ...],
) -> FiveGrads:
    call = Operands(*args)
    arguments = (dout, dlse, out, lse, bias_grad, call.q, call.k, call.v, call.backend, call.options(), target)
    # Results of an operator cannot be None.
    dq, dk, dv, dbias, dsink = (call.q.new_empty(0) if x is None else x for x in run.backward(*arguments))
    return dq, dk, dv, dbias, dsink


@torch.library.register_fake("flashtile::attention", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_attention(*args: Any) -> OutAndLse:
    call = _with_known_numbers(args)
    problem = describe(call.q, call.k, call.v, **call.options())
    return (
        _fake_result(problem, call.q, problem.q, getattr(torch, problem.out_dtype), call.v.shape[-1]),
        call.q.new_empty(call.q.shape[:-1], dtype=getattr(torch, problem.accumulator)),
    )


@torch.library.register_fake("flashtile::attention_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_attention_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, bias_grad: bool, *args: Any
) -> FiveGrads:
    return _fake_gradients(dout, dlse, out, lse, bias_grad, None, args)


@torch.library.register_fake("flashtile::block_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_block_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, bias_grad: bool, grad_dtype: str, *args: Any
) -> FiveGrads:
    return _fake_gradients(dout, dlse, out, lse, bias_grad, getattr(torch, grad_dtype), args)


def _fake_gradients(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    bias_grad: bool,
    dtype: torch.dtype | None,
    args: tuple[Any, ...],
) -> FiveGrads:
    call = _with_known_numbers(args)
    problem = describe(call.q, call.k, call.v, **call.options())
    check_gradients(problem, dout, out, lse, dlse)
    dq, dk, dv = (
        _fake_result(problem, x, view, dtype or x.dtype, x.shape[-1])
        for x, view in ((call.q, problem.q), (call.k, problem.k), (call.v, problem.v))
    )
    dbias, dsink = (
        call.q.new_empty(0)
        if x is None
        else x.new_empty(x.shape, dtype=x.dtype if dtype is None else torch.promote_types(x.dtype, dtype))
        for x in (call.bias if bias_grad else None, call.sink)
    )
    return dq, dk, dv, dbias, dsink


def _fake_result(problem: Problem, x: Tensor, view: Tensor, dtype: torch.dtype, width: Any) -> Tensor:
    """A result of this width in the order of x in memory, as the backends make it. view: x with rank 4."""
    shape = (*x.shape[:-1], width)
    order = of_caller(problem.order_of(view, _is_less), problem.rank, problem.packed)
    if order is None:
        return x.new_empty(shape, dtype=dtype)
    in_memory = x.new_empty([shape[axis] for axis in order], dtype=dtype)
    return in_memory.permute([order.index(axis) for axis in range(len(order))])


def _is_less(a: Any, b: Any) -> bool:
    """Whether a < b; False if a symbol of the graph leaves that open."""
    if type(a) is type(b) is int:
        return bool(a < b)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(a < b))


def _with_known_numbers(args: tuple[Any, ...]) -> Operands:
    """The call with symbolic numbers replaced by 0, and without an origin that has one: it may not allow 0."""
    call = Operands(*(_known(x) for x in args))
    origin = Operands(*args).origin
    return call._replace(origin=None) if origin is not None and any(map(_is_symbolic, origin)) else call


def _known(x: Any) -> Any:
    if isinstance(x, list):
        return [_known(y) for y in x]
    return 0 if _is_symbolic(x) else x


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, torch.SymInt | torch.SymFloat)
