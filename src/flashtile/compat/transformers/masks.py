"""Masks for layers: booleans as for torch's SDPA, or the numbers of "eager" for models that know no others."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Configurations of models that transformers does not run on SDPA: they add to their masks, or join others to them.
ADDITIVE: set[type] = set()
# Model types whose layers would misread None in the place of a causal mask.
NEVER_NONE = (
    # They drop queries of a layer, and keep all for "sdpa" alone where there is no mask.
    "gemma4",
    # They make a mask of their own, in which None leaves nothing out.
    "doge",
    # Layers that are causal say that they are not, or the other way round.
    "aimv2",
    "align_text_model",
    "bert-generation",
    "clap_text_model",
    "phi4_multimodal_vision",
    "splinter",
)
# Masks made here for rows without padding, by their ids.
_unpadded: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
# Model types that read what queries without a key give: by "eager", and so here, the mean of all values.
MEAN_OF_VALUES = ("diffusion_gemma",)


def mask(*arguments: Any, **options: Any) -> Any:
    """What transformers' masks come to, for these arguments of its mask functions."""
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
        elif fewest == 0 and numbers:  # nothing but padding in a row, of which a decoder reads what "eager" makes of it
            found = masking_utils.eager_mask(*arguments, **options)
    return found


def is_unpadded(mask: Tensor | None) -> bool:
    """Whether this is a mask of ours that hides no padding; a caller's own says all, as to "eager"."""
    if mask is None:
        return True
    # A graph that asked for an id would be good for this tensor alone.
    return not torch.compiler.is_compiling() and _unpadded.get(id(mask)) is mask


def none_hides_nothing(config: Any) -> bool:
    """Whether None means what it means to "eager", that all is seen; else it may stand for a causal mask."""
    return _additive(config) or getattr(config, "model_type", "").startswith(NEVER_NONE)


def _additive(config: Any) -> bool:
    return type(config) in ADDITIVE or getattr(config, "model_type", "").startswith(MEAN_OF_VALUES)


def _hides_cache_rows(
    q_length: int = 0, kv_length: int = 0, q_offset: Any = 0, kv_offset: int = 0, **_others: Any
) -> bool:
    """Whether one query stands before the last key: without a mask it would see what follows it."""
    if q_length != 1 or kv_length == 1:
        return False
    return isinstance(q_offset, torch.Tensor) or q_offset + 1 < kv_offset + kv_length
