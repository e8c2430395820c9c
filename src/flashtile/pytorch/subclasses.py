"""Kinds of tensors that do not hold their values plainly: refused by name, or made into what attention() takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashtile.errors import DTypeError, ShapeError
from flashtile.pytorch.interception import can_skip_dispatcher, check_storage

# By the module of a class. Other subclasses have the operators to answer to, or hold values as plain tensors do.
_REFUSED = {
    "torch.nn.attention.bias": "a {}, which has no values; causal=True is the lower right one, "
    "and band=flashtile.Band(right=0) the upper left one",
    "torch.distributed.tensor": "a {}, whose values are spread over devices; x.to_local() has those of this one",
    "torch.masked": "a {}, whose mask nobody looks at",
}


def check_plain(tensors: Mapping[str, Any]) -> None:
    """That each is dense, and holds the values that it stands for."""
    for name, x in tensors.items():
        if x is None:
            continue
        if x.is_nested:
            jagged = "; attention_packed() takes its values() and offsets()" if x.layout is torch.jagged else ""
            raise DTypeError(f"{name}: expected a dense tensor, got a nested one{jagged}")
        if x.layout is not torch.strided:
            raise DTypeError(f"{name}: expected a dense tensor, got {x.layout}")
        if x.__class__ is Tensor or x.__class__ is torch.nn.Parameter:
            continue
        kind = type(x)
        for module, what in _REFUSED.items():
            if kind.__module__.startswith(module):
                raise DTypeError(f"{name}: expected a plain tensor, got {what.format(kind.__name__)}")


def check_storage_if_eager(tensors: Mapping[str, Any]) -> None:
    """That the storage of each, which may have been freed, holds all of it; of none where others see the call first."""
    if not torch.compiler.is_compiling() and can_skip_dispatcher([x for x in tensors.values() if x is not None]):
        check_storage({name: x for name, x in tensors.items() if x is not None})


def triangle(bias: Any, n_q: int, n_k: int) -> bool | None:
    """Of a CausalBias, whether it is aligned at the last key (and query), not the first; None of any other tensor."""
    if type(bias) is Tensor or not isinstance(bias, _causal_bias()):
        return None
    last: bool = bias.variant.name == "LOWER_RIGHT"
    if last and (bias.seq_len_q, bias.seq_len_kv) != (n_q, n_k):
        sizes = bias.seq_len_q, bias.seq_len_kv
        raise ShapeError(f"attn_mask: expected a CausalBias of {n_q} queries and {n_k} keys, got one of {sizes}")
    return last


def materialized(mask: Any, device: torch.device) -> Any:
    """A CausalBias as the mask that it stands for; any other as it is."""
    if type(mask) is Tensor or not isinstance(mask, _causal_bias()):
        return mask
    return mask._materialize(device)


def _causal_bias() -> Any:
    from torch.nn.attention.bias import CausalBias

    return CausalBias


def jagged(name: str, x: Any) -> tuple[Tensor, Tensor]:
    """The rows of a nested tensor, (batch, heads, lengths, dim), as (total, heads, dim), and where sequences start."""
    if not x.is_nested or x.layout is not torch.jagged:
        raise DTypeError(f"{name}: expected a nested tensor of layout torch.jagged like the others, got {x.layout}")
    if x.dim() != 4 or x._ragged_idx != 2:
        raise ShapeError(f"{name}: expected (batch, heads, lengths, dim) with one length a sequence, got {x.shape}")
    rows = x.transpose(1, 2)
    if rows.lengths() is not None:
        raise DTypeError(f"{name}: expected sequences without gaps, got a nested tensor with some; see contiguous()")
    return rows.values(), rows.offsets()


def ragged_heads(x: Any) -> bool:
    """Whether it is nested by numbers of heads, (batch, numbers, length, dim)."""
    return bool(
        x.is_nested and x.layout is torch.jagged and x.dim() == 4 and x._ragged_idx == 1 and x.lengths() is None
    )


def nested(rows: Tensor, like: Any) -> Tensor:
    """The way back from jagged(), with the lengths of another one."""
    return nested_as(rows, like.transpose(1, 2)).transpose(1, 2)


def nested_as(rows: Tensor, like: Any) -> Tensor:
    """Rows nested as those of another one."""
    return torch.nested.nested_tensor_from_jagged(rows, like.offsets())
