"""The function transformers calls for a layer: converts its arguments to attention()'s, and rejects unknown ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention
from flashtile.band import Band
from flashtile.compat.errors import raise_runtime_errors
from flashtile.compat.options import dropout_options, mask_options
from flashtile.compat.transformers import packed, selection
from flashtile.compat.transformers.masks import is_unpadded, none_hides_nothing
from flashtile.compat.transformers.span_mask import SpanMask
from flashtile.errors import ShapeError, UnsupportedError
from flashtile.spans import Spans

# Keywords that models pass to every layer but that do not affect its attention. Any other is an error.
IGNORED = frozenset(
    {
        # Already applied to q and k, or part of the mask.
        "input_ids",
        "cache_position",
        "position_embeddings",
        "past_key_values",
        "token_type_ids",
        "mm_token_type_ids",
        "grid_thw",
        # About the model's results, not a layer's.
        "use_cache",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "logits_to_keep",
        "labels",
        "shift_labels",
        # For generate(); some models pass all of its arguments on.
        "do_sample",
        "max_new_tokens",
        "max_length",
        "num_beams",
        "pad_token_id",
        "eos_token_id",
        "cache_implementation",
        "disable_compile",
        # Hints for kernels: the longest sequence in cu_seq_lens_q and cu_seq_lens_k.
        "max_length_q",
        "max_length_k",
        # Documents for recurrent layers; attention gets them from the mask or from cu_seq_lens_q.
        "seq_idx",
    }
)


@raise_runtime_errors
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
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    deterministic: bool | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Take (batch, heads, rows, dim), return (batch, rows, heads, dim) and no weights."""
    check_others(others, output_attentions)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, **dropout_options(dropout, query)}
    if deterministic:
        options["deterministic"] = True
    if s_aux is not None:
        options["sink"] = match_dtype(query, s_aux)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if (
        cu_seq_lens_q is None
        and cu_seq_lens_k is None
        and is_causal
        and position_ids is not None
        and is_unpadded(attention_mask)
    ):
        cu_seq_lens_q = cu_seq_lens_k = packed.starts(position_ids, query, key)
    marked = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if attention_mask is not None:  # it includes causal and window
        options |= _masked(attention_mask, query, key)
    elif is_causal and not none_hides_nothing(getattr(module, "config", None)):
        if marked:
            options["causal"] = True
            options["window"] = None if sliding_window is None else (sliding_window - 1, None)
        elif query.shape[2] > 1:
            # The first query is aligned with the first key, and keys after the last query are unused rows of a cache.
            options["band"] = Band(right=0) if sliding_window is None else Band(sliding_window - 1, 0)
    if position_bias is not None:
        bias = match_dtype(query, position_bias[..., : key.shape[2]])
        options["bias"] = bias + options["bias"] if "bias" in options else bias
    if indices is not None or block_indices is not None:
        keep = selection.selected(indices, block_indices, module, query.shape[1], key.shape[2])
        options["mask"] = options["mask"] & keep if "mask" in options else keep
    if marked:
        masked_by = None
        if indices is not None or block_indices is not None:
            masked_by = "keys that an indexer selected"
        elif getattr(getattr(module, "config", None), "attention_chunk_size", None) is not None:
            masked_by = "attention in chunks"
        starts = (cu_seq_lens_q, cu_seq_lens_k)
        out, lse = packed.attend(query, key, value, starts, masked_by, sinks is not None, options)
    elif sinks is None:
        out, lse = attention(query, key, value, layout="bhnd", **options), None
    else:
        out, lse = attention(query, key, value, layout="bhnd", return_lse=True, **options)
    if lse is not None and sinks is not None:
        out = apply_sinks(out, lse, sinks)
    return out.transpose(1, 2).contiguous(), None


def check_others(others: dict[str, Any], output_attentions: bool | None) -> None:
    """Check that the arguments that no option stands for do not affect a layer's attention."""
    for name, x in others.items():
        if x is not None and name not in IGNORED:
            raise UnsupportedError(f"{name}: expected None, because layers here do not support it, got {_short(x)}")
    if output_attentions:
        raise UnsupportedError(
            'output_attentions: expected False, because weights are never stored ("eager" does), got True'
        )


def _masked(mask: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    if mask.ndim != 4:
        raise ShapeError(f"attention_mask: expected 4 axes, (batch, heads, queries, keys), got {tuple(mask.shape)}")
    if isinstance(mask, SpanMask):
        return {"spans": Spans.of(mask.limits)}
    options = mask_options("attention_mask", mask[..., : key.shape[2]])
    if "bias" in options:
        options["bias"] = match_dtype(query, options["bias"])
    return options


def match_dtype(query: Tensor, x: Tensor) -> Tensor:
    """Convert a bias or a sink to a dtype that attention() takes with these queries."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    return x if x.dtype == query.dtype or (half and x.dtype == torch.float32) else x.to(query.dtype)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Apply one more logit per row, (batch, heads, rows, 1), that adds no value: it shrinks the other weights."""
    return (out * torch.sigmoid(lse.unsqueeze(-1) - sinks)).to(out.dtype)


def _short(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)[:80]
