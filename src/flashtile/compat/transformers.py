"""Models of transformers on flashtile: register() once, then from_pretrained(..., attn_implementation="tiled").

transformers takes any name with "flash" in it for flash_attn, so ours has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention
from flashtile.compat.options import dropped, masked

NAME = "tiled"


def register(name: str = NAME) -> None:
    """Make it known by this name, with masks as torch's SDPA has them."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for a layer: (batch, heads, rows, dim) in, (batch, rows, heads, dim) out; no weights."""
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sink": s_aux, **dropped(dropout)}
    if attention_mask is not None:  # all that a row may see, causal and window included
        options |= masked("attention_mask", attention_mask[..., : key.shape[2]])
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options["causal"] = bool(causal) and query.shape[2] > 1
        if sliding_window is not None:
            options["window"] = (sliding_window - 1, sliding_window - 1)
    out = attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None
