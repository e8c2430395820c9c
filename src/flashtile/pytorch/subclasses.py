"""Tensors that are not plain, dense tensors: rejected by name, or converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashtile.errors import DTypeError, ShapeError
from flashtile.pytorch.interception import can_skip_dispatcher, check_storage

# By the module of the class. Other subclasses intercept the operators, or hold their values as plain tensors do.
_REFUSED = {
    "torch.nn.attention.bias": "a {}, which has no values; causal=True is the lower right one, "
    "and band=flashtile.Band(right=0) the upper left one",
    "torch.masked": "a {}, whose mask would be ignored",
}


def check_plain(tensors: Mapping[str, Any]) -> None:
    """Check that each tensor is dense, and holds its values itself."""
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
    """Check the storage of each tensor, unless the call is traced or intercepted."""
    if not torch.compiler.is_compiling() and can_skip_dispatcher([x for x in tensors.values() if x is not None]):
        check_storage({name: x for name, x in tensors.items() if x is not None})


def is_lower_right(bias: Any, n_q: int, n_k: int) -> bool | None:
    """Whether a CausalBias aligns the last query with the last key, rather than the first; None for other tensors."""
    if type(bias) is Tensor or not isinstance(bias, _causal_bias()):
        return None
    last: bool = bias.variant.name == "LOWER_RIGHT"
    if last and (bias.seq_len_q, bias.seq_len_kv) != (n_q, n_k):
        sizes = bias.seq_len_q, bias.seq_len_kv
        raise ShapeError(f"attn_mask: expected a CausalBias of {n_q} queries and {n_k} keys, got one of {sizes}")
    return last


def materialized(mask: Any, device: torch.device) -> Any:
    """Convert a CausalBias to a mask; return any other mask unchanged."""
    if type(mask) is Tensor or not isinstance(mask, _causal_bias()):
        return mask
    return mask._materialize(device)


def _causal_bias() -> Any:
    from torch.nn.attention.bias import CausalBias

    return CausalBias


def jagged_rows(name: str, x: Any) -> tuple[Tensor, Tensor]:
    """Return the rows of a nested tensor (batch, heads, lengths, dim) as (total, heads, dim), and their starts."""
    if not x.is_nested or x.layout is not torch.jagged:
        raise DTypeError(f"{name}: expected a nested tensor of layout torch.jagged like the others, got {x.layout}")
    if x.dim() != 4 or x._ragged_idx != 2:
        raise ShapeError(f"{name}: expected (batch, heads, lengths, dim) with one length per sequence, got {x.shape}")
    rows = x.transpose(1, 2)
    if rows.lengths() is not None:
        raise DTypeError(f"{name}: expected sequences without gaps, got a nested tensor with gaps; call contiguous()")
    return rows.values(), rows.offsets()


def ragged_heads(x: Any) -> bool:
    """Whether x is nested with ragged heads, (batch, ragged heads, length, dim)."""
    return bool(
        x.is_nested and x.layout is torch.jagged and x.dim() == 4 and x._ragged_idx == 1 and x.lengths() is None
    )


def to_nested(rows: Tensor, like: Any) -> Tensor:
    """Undo jagged_rows(), with the lengths of `like`."""
    return nested_like(rows, like.transpose(1, 2)).transpose(1, 2)


def nested_like(rows: Tensor, like: Any) -> Tensor:
    """Nest rows with the offsets of `like`."""
    return torch.nested.nested_tensor_from_jagged(rows, like.offsets())
