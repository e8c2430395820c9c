"""torch.func.vmap: the mapped axis is folded into the batch; if it cannot be, the calls run one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.options import OPTIONS
from flashtile.pytorch import operators
from flashtile.pytorch.operands import FIELDS, Operands

Dims = tuple[int | None, ...]
Mapped = tuple[tuple[Tensor, ...], tuple[int, ...]]
_RANKS = {"q": 4, "k": 4, "v": 4} | {name: option.rank for name, option in OPTIONS.items() if option.rank}


class Fold:
    """Folds n examples, each with a batch, into one batch; unmapped arguments are shared."""

    def __init__(self, n: int, q: Tensor, mapped: bool) -> None:
        shape = q.shape[1:] if mapped else q.shape
        self.n, self.batch = n, shape[0] if len(shape) == 4 else 1

    def fold(self, x: Tensor | None, mapped: bool, rank: int = 4) -> Tensor | None:
        """Give each example `rank` axes, starting with its batch; then flatten n and the batch."""
        if x is None:
            return None
        x = x if mapped else x.expand(self.n, *x.shape)
        while x.dim() <= rank:
            x = x.unsqueeze(1)
        return x.expand(self.n, self.batch, *x.shape[2:]).flatten(0, 1)

    def call(self, call: Operands, mapped: Operands) -> Operands:
        folded: Operands = call._replace(
            seed_tensor=None,  # there is no dropout
            **{name: self.fold(getattr(call, name), getattr(mapped, name), rank) for name, rank in _RANKS.items()},
        )
        return folded

    def unfold(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Unfold n results of this shape. The gradient of an input that its batch shares is summed."""
        x = x.reshape(self.n, self.batch, *x.shape[1:])
        if self.batch != 1 and (len(shape) < 4 or shape[0] == 1):
            x = x.sum(1)
        return x.reshape(self.n, *shape)


def _attention(info: Any, dims: Dims, *args: Any) -> Mapped:
    n = info.batch_size
    args, mapped = _mapped_first(args, dims)
    call, is_mapped = Operands(*args), Operands(*mapped)
    if _cannot_fold(call) or is_mapped.sink:
        return _one_by_one(operators.ATTENTION, n, args, mapped)
    rows = call.q.shape[is_mapped.q : -1]
    out, lse = operators.ATTENTION(*Fold(n, call.q, is_mapped.q).call(call, is_mapped))
    return (out.reshape(n, *rows, out.shape[-1]), lse.reshape(n, *rows)), (0, 0)


def _gradients(op: Callable[..., Any], info: Any, dims: Dims, *args: Any) -> Mapped:
    """Run attention_backward or block_backward; between the tensors of both and the call are numbers."""
    n = info.batch_size
    args, mapped = _mapped_first(args, dims)
    dout, dlse, out, lse, *numbers = args[: -len(FIELDS)]
    bias_grad = numbers[0]
    call, is_mapped = Operands(*args[-len(FIELDS) :]), Operands(*mapped[-len(FIELDS) :])
    if _cannot_fold(call) or call.sink is not None:  # the gradient of a sink sums over the batch
        return _one_by_one(op, n, args, mapped)
    fold = Fold(n, call.q, is_mapped.q)
    grads = op(
        fold.fold(dout, mapped[0]),
        fold.fold(dlse, mapped[1], 3),
        fold.fold(out, mapped[2]),
        fold.fold(lse, mapped[3], 3),
        *numbers,
        *fold.call(call, is_mapped),
    )
    inputs = (
        (call.q, is_mapped.q),
        (call.k, is_mapped.k),
        (call.v, is_mapped.v),
        (call.bias if bias_grad else None, is_mapped.bias),
        (None, False),
    )
    return (
        tuple(
            grad.expand(n, 0) if x is None else fold.unfold(grad, x.shape[m:])
            for grad, (x, m) in zip(grads, inputs, strict=True)
        ),
        (0,) * 5,
    )


def _mapped_first(args: tuple[Any, ...], dims: Dims) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """Move the mapped axes to the front; also return which arguments have one."""
    mapped = tuple(isinstance(x, Tensor) and d is not None for x, d in zip(args, dims, strict=True))
    return tuple(x.movedim(d, 0) if m else x for x, d, m in zip(args, dims, mapped, strict=True)), mapped


def _cannot_fold(call: Operands) -> bool:
    """Whether the call has no batch (packed sequences), or depends on the batch index (dropout)."""
    return call.cu_q is not None or call.dropout != 0


def _one_by_one(op: Callable[..., tuple[Tensor, ...]], n: int, args: Sequence[Any], mapped: Sequence[bool]) -> Mapped:
    if n == 0:  # the results are empty, but need their shapes and gradients
        outlines = (x.detach().to("meta") if isinstance(x, Tensor) else x for x in args)
        one = op(*(x.new_empty(x.shape[1:]) if m else x for x, m in zip(outlines, mapped, strict=True)))
        nothing = sum(0 * x.sum() for x in args if isinstance(x, Tensor) and x.requires_grad)
        stacked = tuple(
            torch.empty((0, *each.shape), dtype=each.dtype, device=args[0].device) + nothing for each in one
        )
    else:
        results = [op(*(x[i] if m else x for x, m in zip(args, mapped, strict=True))) for i in range(n)]
        stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


torch.library.register_vmap("flashtile::attention", _attention, lib=operators.LIBRARY)
for _op in (operators.ATTENTION_BACKWARD, operators.BLOCK_BACKWARD):
    torch.library.register_vmap(_op, partial(_gradients, _op), lib=operators.LIBRARY)
