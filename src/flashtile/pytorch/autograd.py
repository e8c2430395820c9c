"""Gradients for q, k, v, bias and sink, from out and from lse.

Eager calls come by the Functions, which cost less and which torch.func understands; compiled ones by the operators,
which have the same formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile.errors import UnsupportedError
from flashtile.pytorch import eight_bits, ops
from flashtile.pytorch.call import N_TENSORS, Call

_NONE = Call(*(None for _ in Call._fields))


class Attention(torch.autograd.Function):
    """out and lse, and the way back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return ops.attention(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if Call(*ctx.needs_input_grad[: len(inputs)]).alibi:
            raise UnsupportedError("alibi: expected slopes that need no gradient; a bias has one")
        if inputs[0].dtype is eight_bits.DTYPE:
            raise UnsupportedError(f"q, k, v: expected inputs that need no gradient, for {eight_bits.DTYPE} has none")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:N_TENSORS], *output)
        ctx.settings = inputs[N_TENSORS:]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        needs = Call(*ctx.needs_input_grad)
        if dout is None:  # only the lse was used
            dout = torch.zeros_like(out)
        run = AttentionBackward.apply if torch.is_grad_enabled() else ops.attention_backward
        grads = run(dout, dlse, out, lse, needs.bias, *tensors, *ctx.settings)
        named = zip(("q", "k", "v", "bias", "sink"), grads, strict=True)
        return _NONE._replace(**{name: grad for name, grad in named if getattr(needs, name)})


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


for _name, _function in (("attention", Attention), ("attention_backward", AttentionBackward)):
    torch.library.register_autograd(
        f"flashtile::{_name}", _function.backward, setup_context=_function.setup_context, lib=ops.LIBRARY
    )


def reject_forward_mode(tensors: Iterable[Tensor]) -> None:
    """Tangents would be lost without a word, for the dispatcher does not look for them."""
    unpack: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(unpack(x).tangent is not None for x in tensors):
        raise UnsupportedError("q, k, v: attention has gradients, but no forward-mode derivatives")
