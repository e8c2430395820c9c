"""Masks for layers: spans, booleans as for torch's SDPA, or "eager"'s numbers for models that need them."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch.nn.functional import pad

from flashtile.compat.transformers.mask_functions import TooManyRunsError, spans_of
from flashtile.compat.transformers.span_mask import SpanMask
from flashtile.errors import ShapeError
from flashtile.spans import Spans

# Configurations of models that transformers does not run on SDPA: they add to their masks, or concatenate to them.
ADDITIVE: set[type] = set()
# Of these, model types whose masks only go to their layers: it is their caps or sinks that SDPA cannot do.
PASSED_ON = ("flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma")
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
    make = masking_utils.eager_mask if numbers and _additive(config) else _sdpa_mask
    found = make(*arguments, **options)
    seen = options.get("attention_mask")  # (batch, keys)
    if found is not None and _readable(seen):
        fewest = None if seen is None else int(seen.sum(dim=-1).min())
        if seen is None or fewest == seen.shape[-1]:
            _unpadded[id(found)] = found
        elif fewest == 0 and numbers:  # a row is all padding, and a decoder reads what "eager" computes for it
            found = masking_utils.eager_mask(*arguments, **options)
    return found


class _NeededError(Exception):
    """A mask is needed."""


def _needed(*_indices: Any) -> NoReturn:
    raise _NeededError


def _sdpa_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """The mask that transformers makes for torch's SDPA; as spans for several queries, where its size matters."""
    from transformers import masking_utils

    tensors = (options.get(name) for name in ("cache_position", "q_offset", "attention_mask"))
    if not arguments and _readable(*tensors):
        try:
            return masking_utils.sdpa_mask(**options | {"mask_function": _needed})
        except _NeededError:
            found = _span_mask(**options)
            if found is not None:
                return found
    return masking_utils.sdpa_mask(*arguments, **options)


def _span_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    q_length: int = 0,
    q_offset: Any = 0,
    cache_position: Tensor | None = None,  # in older releases, for q_length and q_offset
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = True,
    device: Any = None,
    **_others: Any,
) -> SpanMask | None:
    """The mask as spans; None if spans cannot express it."""
    from transformers import masking_utils

    if cache_position is not None:
        q_length, device = len(cache_position), cache_position.device
    if q_length < 2 or 0 in (batch_size, kv_length):
        return None
    batch, keys = torch.arange(batch_size, device=device), torch.arange(kv_length, device=device) + kv_offset
    queries = torch.arange(q_length, device=device) + q_offset if cache_position is None else cache_position
    if not _readable(batch, queries):  # on a device without values
        return None
    visible = masking_utils.causal_mask_function if mask_function is None else mask_function
    if attention_mask is not None:
        seen = pad(attention_mask, (0, max(kv_length + kv_offset - attention_mask.shape[-1], 0)))
        visible = masking_utils.and_masks(visible, masking_utils.padding_mask_function(seen))
    shape = (batch_size, 1, q_length, kv_length)
    try:
        return SpanMask(spans_of(visible, batch, queries, keys), shape)
    except TooManyRunsError:
        pass
    except Exception:  # the function asks for more of its arguments than a symbol has
        try:
            return SpanMask(_by_slabs(visible, batch, queries, keys, use_vmap), shape)
        except ShapeError:
            pass
    warnings.warn(
        "a query sees more than 8 runs of keys, so layers get a mask of all pairs; it takes as much memory as for "
        '"sdpa"',
        stacklevel=2,
    )
    return None


def _by_slabs(visible: Any, batch: Tensor, queries: Tensor, keys: Tensor, use_vmap: bool) -> Tensor:
    """Limits of spans of a function that is evaluated for all pairs, for some queries at a time."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    def found(b: Any, _head: Any, i: Any, j: Any) -> Any:
        at = (batch[b], batch.new_zeros(1, 1, 1, 1), queries[i], keys[j])
        if not use_vmap:
            return visible(*at)
        one = visible
        for axis in (3, 2, 1, 0):  # a function of single numbers
            one = torch.vmap(one, in_dims=tuple(0 if n == axis else None for n in range(4)))
        with TransformGetItemToIndex():
            return one(*(x.flatten() for x in at))

    limits: Tensor = Spans.from_function(found, len(batch), 1, len(queries), len(keys), batch.device).limits
    return limits


def _readable(*tensors: Any) -> bool:
    """Whether these have values that can be read now."""
    from transformers import masking_utils

    tracing = getattr(masking_utils, "is_tracing", lambda _: torch.compiler.is_compiling() or torch._C._is_tracing())
    for x in tensors:
        if tracing(x) or (
            isinstance(x, Tensor) and (x.is_meta or isinstance(x, FakeTensor) or is_functorch_wrapped_tensor(x))
        ):
            return False
    return True


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
    kind = getattr(config, "model_type", "")
    return kind.startswith(MEAN_OF_VALUES) or (type(config) in ADDITIVE and not kind.startswith(PASSED_ON))


def _hides_cache_rows(
    q_length: int = 0, kv_length: int = 0, q_offset: Any = 0, kv_offset: int = 0, **_others: Any
) -> bool:
    """Whether there is one query, before the last key: without a mask it would see the keys after it."""
    if q_length != 1 or kv_length == 1:
        return False
    return isinstance(q_offset, torch.Tensor) or q_offset + 1 < kv_offset + kv_length
