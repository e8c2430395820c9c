"""torch's scaled_dot_product_attention, by flashtile: the same call, the same answer, no NaN from what is masked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention
from flashtile.band import Band
from flashtile.compat.options import dropped, masked
from flashtile.errors import ShapeError


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """is_causal lets the first query see the first key alone, as torch has it; attention() aligns the last ones."""
    if attn_mask is not None and is_causal:
        raise ShapeError("is_causal: expected False, because attn_mask is given, got True")
    if not enable_gqa and query.ndim > 2 and query.ndim == key.ndim and query.shape[-3] != key.shape[-3]:
        heads = f"{query.shape[-3]} and {key.shape[-3]} heads"
        raise ShapeError(f"enable_gqa: expected True, because query and key have {heads}, got False")
    options: dict[str, Any] = {"scale": scale, **dropped(dropout_p, query)}
    if is_causal:
        options["band"] = Band(right=0)
    lead = query.shape[:-3]
    if attn_mask is not None:
        options |= masked("attn_mask", attn_mask if len(lead) < 2 else _flat(attn_mask, lead))
    if len(lead) > 1:
        query, key, value = (x.flatten(0, -4) if x.ndim > 4 else x for x in (query, key, value))
    out: Tensor = attention(query, key, value, **options)
    return out if len(lead) < 2 else out.reshape(*lead, *out.shape[1:])


def _flat(mask: Tensor, lead: torch.Size) -> Tensor:
    """A mask for leading axes that become one; of four axes at most."""
    if mask.ndim < 4:
        return mask
    return mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
