"""Gradients for q, k, v, bias and sink, from out and from lse.

Eager calls come by the Functions, which cost less and which torch.func understands; compiled ones by the operators,
which have formulas to the same effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile.errors import UnsupportedError
from flashtile.pytorch import eight_bits, kernel, ops
from flashtile.pytorch.call import N_TENSORS, Call, Settings

_NONE = Call(*(None for _ in Call._fields))


class WatchedAttention(torch.autograd.Function):
    """out and lse, and the way back: of Settings, q, k, v and the tensors among the options."""

    generate_vmap_rule = True

    @staticmethod
    def forward(settings: Settings, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
        return ops.ATTENTION(*settings.call(q, k, v, others))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.settings, *tensors = inputs
        names = ctx.settings.names
        if "alibi" in names:
            reject_gradients(tensors[0], ctx.needs_input_grad[4 + names.index("alibi")])
        _save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, *others, out, lse = ctx.saved_tensors
        _, need_q, need_k, need_v, *need_others = ctx.needs_input_grad
        settings = ctx.settings
        needs = dict(zip(settings.names, need_others, strict=True)) if others else {}
        if dout is None:  # only the lse was used
            dout = torch.zeros_like(out)
        run = AttentionBackward.apply if torch.is_grad_enabled() else ops.attention_backward
        dq, dk, dv, dbias, dsink = run(settings, needs.get("bias", False), dout, dlse, out, lse, q, k, v, *others)
        grads = {"bias": dbias, "sink": dsink}
        return (
            None,
            dq if need_q else None,
            dk if need_k else None,
            dv if need_v else None,
            *(grads.get(name) if need else None for name, need in needs.items()),
        )


class Attention(WatchedAttention):
    """The same where nothing stands between the call and its kernel."""

    @staticmethod
    def forward(settings: Settings, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
        return kernel.forward(q, k, v, settings.backend, settings.options_with(others))


# Attention.apply() without what torch does first: it binds the arguments to the signature of forward(), which takes
# longer than all the rest, and hands them to torch.func, which would be watching.
record: Any = super(torch.autograd.Function, Attention).apply


class AttentionBackward(torch.autograd.Function):
    """The way back, from which there is none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return ops.attention_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError("q, k, v: attention can be differentiated once, its gradients cannot")


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def reject_gradients(q: Tensor, of_alibi: bool) -> None:
    """Of a call of which some are asked for: what has none. of_alibi: its slopes are among them."""
    if q.dtype is eight_bits.DTYPE:
        raise UnsupportedError(f"q, k, v: expected inputs that need no gradient, for {eight_bits.DTYPE} has none")
    if of_alibi:
        raise UnsupportedError("alibi: expected slopes that need no gradient; a bias has one")


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Of the operator."""
    reject_gradients(inputs[0], Call(*ctx.needs_input_grad[: len(inputs)]).alibi)
    _save(ctx, *inputs[:N_TENSORS], *output)
    ctx.settings = inputs[N_TENSORS:]


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Call:
    """Of the operator."""
    *tensors, out, lse = ctx.saved_tensors
    needs = Call(*ctx.needs_input_grad)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = ops.ATTENTION_BACKWARD(dout, dlse, out, lse, needs.bias, *tensors, *ctx.settings)
    named = zip(("q", "k", "v", "bias", "sink"), grads, strict=True)
    return _NONE._replace(**{name: grad for name, grad in named if getattr(needs, name)})


for _name, _way_back, _before in (
    ("attention", _backward, _set_up),
    ("attention_backward", AttentionBackward.backward, AttentionBackward.setup_context),
):
    torch.library.register_autograd(f"flashtile::{_name}", _way_back, setup_context=_before, lib=ops.LIBRARY)


def reject_forward_mode(tensors: Iterable[Tensor]) -> None:
    """Tangents would be lost without a word, for the dispatcher does not look for them."""
    unpack: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(unpack(x).tangent is not None for x in tensors):
        raise UnsupportedError("q, k, v: attention has gradients, but no forward-mode derivatives")
