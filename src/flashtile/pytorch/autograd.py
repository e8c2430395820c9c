"""Gradients for q, k, v, bias and sink, from out and from lse.

Plain eager calls use a torch.autograd.Function, which costs less; all others use the operators, whose autograd kernels
are also here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from flashtile.errors import UnsupportedError
from flashtile.inputs import Inputs
from flashtile.pytorch import calls, eight_bits, operators, run, sharding
from flashtile.pytorch.interception import can_skip_dispatcher
from flashtile.pytorch.operands import FIELDS, TENSOR_ARGUMENTS, Operands, operands

_NO_GRADIENTS = Operands(*(None for _ in FIELDS))


class Attention(torch.autograd.Function):
    """out and lse with gradients, from an Entry, its Inputs, q, k, v and the tensors among the options."""

    @staticmethod
    def forward(entry: calls.Entry, x: Inputs, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
        return entry.runner.forward(x, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.entry, x, *tensors = inputs
        ctx.seed = x.seed if x.seed.__class__ is int else 0  # a seed tensor is among `others`
        _save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        _, _, need_q, need_k, need_v, *need_others = ctx.needs_input_grad
        entry = ctx.entry
        needs = dict(zip(entry.names, need_others, strict=True)) if need_others else {}
        if dout is None:  # only the lse has a gradient
            dout = torch.zeros_like(out)
        dq, dk, dv, dbias, dsink = _run_backward(
            entry, ctx.seed, needs.get("bias", False), dout, dlse, out, lse, tensors
        )
        grads = {"bias": dbias, "sink": dsink}
        return (
            None,
            None,
            dq if need_q else None,
            dk if need_k else None,
            dv if need_v else None,
            *(grads.get(name) if need else None for name, need in needs.items()),
        )


def _run_backward(
    entry: calls.Entry,
    seed: Any,
    bias_grad: bool,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tensors: list[Tensor],
) -> calls.Grads:
    """Run the operator, or its runner if autograd records nothing and no mode, subclass or transform must see the call.

    Compiled autograd must see it, for one. Saved-tensor hooks may return tensors with other strides.
    """
    q, k, v, *others = tensors
    options = entry.options_with(others, seed)
    all_tensors = [dout, out, lse, *tensors]
    if dlse is not None:
        all_tensors.append(dlse)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not can_skip_dispatcher(all_tensors):
        grads: operators.FiveGrads = operators.ATTENTION_BACKWARD(
            dout, dlse, out, lse, bias_grad, *operands(q, k, v, entry.backend, options)
        )
        return grads
    if not entry.fits_backward(tuple(tensors)):
        return run.backward(dout, dlse, out, lse, bias_grad, q, k, v, entry.backend, options)
    return entry.run_backward(entry.inputs(q, k, v, options), options, dout, dlse, out, lse, bias_grad)


# Attention.apply() without torch's preparations: binding the arguments to forward()'s signature, which takes longer
# than all the rest, and the check for torch.func, which sees none of these calls.
record: Any = super(torch.autograd.Function, Attention).apply


class Operator(_SingleLevelFunction):  # for at most one level of torch.func
    """An operator that autograd records. Takes a function that runs it below autograd, and its arguments."""

    @staticmethod
    def forward(below: Callable[..., Any], *args: Any) -> Any:
        # A lower level of torch.func may also record it, or have tangents.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return below(*args)


class _Forward(Operator):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, *args = inputs
        reject_gradients(args[0], Operands(*ctx.needs_input_grad[1:]).alibi)
        _save(ctx, *args[: len(TENSOR_ARGUMENTS)], *output)
        ctx.numbers = args[len(TENSOR_ARGUMENTS) :]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        needs = Operands(*ctx.needs_input_grad[1:])
        if dout is None:
            dout = torch.zeros_like(out)
        grads = operators.ATTENTION_BACKWARD(dout, dlse, out, lse, needs.bias, *tensors, *ctx.numbers)
        named = zip(("q", "k", "v", "bias", "sink"), grads, strict=True)
        return None, *_NO_GRADIENTS._replace(**{name: grad for name, grad in named if getattr(needs, name)})


class Backward(Operator):
    """The backward pass, which has no gradients itself."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError("q, k, v: attention can be differentiated once; its gradients cannot be differentiated")


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def reject_gradients(q: Tensor, of_alibi: bool) -> None:
    """Raise an error for inputs without gradients. of_alibi: alibi requires one."""
    if q.dtype is eight_bits.DTYPE:
        raise UnsupportedError(f"q, k, v: expected inputs that need no gradient, because {eight_bits.DTYPE} has none")
    if of_alibi:
        raise UnsupportedError("alibi: expected slopes that need no gradient; a bias can have one")


def reject_forward_mode(tensors: Iterable[Tensor]) -> None:
    """Raise an error for tangents, which the dispatcher would drop silently."""
    unpack: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(unpack(x).tangent is not None for x in tensors):
        raise UnsupportedError("q, k, v: attention has gradients, but no forward-mode derivatives")


def register(op: Any, function: Any) -> None:
    """Register a Function as torch.library.register_autograd() does, but one that torch.func accepts.

    The dispatcher calls it at each level of torch.func, with the tensors of that level.
    """

    def recorded(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        def below(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

        sharding.register()
        reject_forward_mode(x for x in args if isinstance(x, Tensor))
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return below(*args)
        with enable_single_level_autograd_function():
            return function.apply(below, *args)

    operators.LIBRARY.impl(op, recorded, "Autograd", with_keyset=True)


register(operators.ATTENTION, _Forward)
register(operators.ATTENTION_BACKWARD, Backward)
register(operators.BLOCK_BACKWARD, Backward)
