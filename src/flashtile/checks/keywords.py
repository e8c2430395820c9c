"""Keywords that a function does not have: what it calls the thing instead, or the nearest of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from flashtile.errors import DTypeError

_MASK = "mask (boolean, True where a query may attend) or bias (numbers added to the scores)"
_CHANGED = "bias, alibi or softcap: scores are not changed by functions"
_PADDING = "kv_lengths, or sequences packed without padding, by cu_q and cu_k"
# By the names that torch, flash_attn, transformers and xFormers have for it.
ELSEWHERE = {
    "is_causal": "causal, for which the last query stands at the last key (flashtile.compat.sdpa does as torch does)",
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "attn_bias": _MASK,
    "block_mask": "mask, band, causal or window",
    "score_mod": _CHANGED,
    "key_padding_mask": _PADDING,
    "dropout_p": "dropout, with a seed",
    "attention_dropout": "dropout, with a seed",
    "enable_gqa": "nothing in its place: k and v may have fewer heads than q as they are",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "window_size": "window, (left, right), where None and not -1 means no limit",
    "sliding_window": "window, (left, right)",
    "logits_soft_cap": "softcap",
    "alibi_slopes": "alibi",
    "s_aux": "sink",
    "sinks": "sink",
    "position_bias": "bias",
    "cache_seqlens": "kv_lengths",
    "seqused_k": "kv_lengths",
    "cu_seqlens_q": "cu_q, of attention_packed()",
    "cu_seqlens_k": "cu_k, of attention_packed()",
    "cu_q": "no packed sequences here; attention_packed() takes them",
    "cu_k": "no packed sequences here; attention_packed() takes them",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse; weights are what flashtile.probabilities() gives",
    "need_weights": "nothing in its place: weights are what flashtile.probabilities() gives",
    "layout": "nothing in its place: here axes have one order",
}


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """That a function has all that it is given; also a TypeError, as Python's own."""
    for name in given:
        if name in known:
            continue
        wanted = ELSEWHERE.get(name)
        if wanted is None:
            near = get_close_matches(name, sorted(known), n=1)
            wanted = near[0] if near else f"one of {', '.join(sorted(known))}"
        raise DTypeError(f"{name}: expected {wanted}; got a keyword that {function}() does not have")
