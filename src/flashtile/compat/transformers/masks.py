"""Masks for layers: booleans as for torch's SDPA, or "eager"'s numbers for models that need them."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Configurations of models that transformers does not run on SDPA: they add to their masks, or concatenate to them.
ADDITIVE: set[type] = set()
# Model types whose layers would misread None instead of a causal mask.
NEVER_NONE = (
    # It drops queries of a layer, and without a mask keeps all of them for "sdpa" only.
    "gemma4",
    # It builds its own mask, in which None hides nothing.
    "doge",
    # Their causal layers say that they are not causal, or the other way round.
    "aimv2",
    "align_text_model",
    "bert-generation",
    "clap_text_model",
    "phi4_multimodal_vision",
    "splinter",
)
# Masks built here for rows without padding, by their ids.
_unpadded: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
# Model types that read the output of queries that see no key: in "eager", and so here, it is the mean of all values.
MEAN_OF_VALUES = ("diffusion_gemma",)


def mask(*arguments: Any, **options: Any) -> Any:
    """Build the mask for these arguments of transformers' mask functions."""
    from transformers import masking_utils

    config = options.get("config")
    if none_hides_nothing(config) or _hides_cache_rows(**options):
        options["allow_is_causal_skip"] = False
    numbers = options.get("dtype", torch.float32).is_floating_point  # DiffusionGemma asks for numbers that are integers
    make = masking_utils.eager_mask if numbers and _additive(config) else masking_utils.sdpa_mask
    found = make(*arguments, **options)
    seen = options.get("attention_mask")  # (batch, keys)
    tracing = getattr(masking_utils, "is_tracing", lambda _: torch.compiler.is_compiling())
    if found is not None and not tracing(seen):
        fewest = None if seen is None else int(seen.sum(dim=-1).min())
        if seen is None or fewest == seen.shape[-1]:
            _unpadded[id(found)] = found
        elif fewest == 0 and numbers:  # a row is all padding, and a decoder reads what "eager" computes for it
            found = masking_utils.eager_mask(*arguments, **options)
    return found


def is_unpadded(mask: Tensor | None) -> bool:
    """Whether this mask was built here and hides no padding. A caller's own mask is complete, as for "eager"."""
    if mask is None:
        return True
    # A graph that read an id would be valid for this tensor only.
    return not torch.compiler.is_compiling() and _unpadded.get(id(mask)) is mask


def none_hides_nothing(config: Any) -> bool:
    """Whether a mask of None hides nothing, as in "eager"; otherwise it may stand for a causal mask."""
    return _additive(config) or getattr(config, "model_type", "").startswith(NEVER_NONE)


def _additive(config: Any) -> bool:
    return type(config) in ADDITIVE or getattr(config, "model_type", "").startswith(MEAN_OF_VALUES)


def _hides_cache_rows(
    q_length: int = 0, kv_length: int = 0, q_offset: Any = 0, kv_offset: int = 0, **_others: Any
) -> bool:
    """Whether there is one query, before the last key: without a mask it would see the keys after it."""
    if q_length != 1 or kv_length == 1:
        return False
    return isinstance(q_offset, torch.Tensor) or q_offset + 1 < kv_offset + kv_length
