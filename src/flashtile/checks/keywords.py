"""Errors for unknown keywords: they name flashtile's keyword for the same thing, or the closest match."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from flashtile.errors import DTypeError

_MASK = "mask (boolean, True where a query may attend) or bias (numbers added to the scores)"
_CHANGED = "bias, alibi or softcap, because functions cannot change scores"
_PADDING = "kv_lengths, or packed sequences without padding, by cu_q and cu_k"
# The keywords of torch, flash_attn, transformers and xFormers.
FOREIGN_KEYWORDS = {
    "is_causal": "causal, which aligns the last query with the last key (flashtile.compat.sdpa aligns as torch does)",
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "attn_bias": _MASK,
    "block_mask": "mask, band, causal or window",
    "score_mod": _CHANGED,
    "key_padding_mask": _PADDING,
    "dropout_p": "dropout, with a seed",
    "attention_dropout": "dropout, with a seed",
    "enable_gqa": "no keyword, because k and v may always have fewer heads than q",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "window_size": "window, (left, right), with None instead of -1 for no limit",
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
    "cu_q": "no packed sequences; attention_packed() takes them",
    "cu_k": "no packed sequences; attention_packed() takes them",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse; flashtile.probabilities() returns the weights",
    "need_weights": "no keyword; flashtile.probabilities() returns the weights",
    "layout": "no keyword, because this function takes one layout",
}


def check_keywords(function: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise a DTypeError, which is a TypeError as in Python, for keywords that a function does not have."""
    for name in names:
        if name in known:
            continue
        wanted = FOREIGN_KEYWORDS.get(name)
        if wanted is None:
            near = get_close_matches(name, sorted(known), n=1)
            wanted = near[0] if near else f"one of {', '.join(sorted(known))}"
        raise DTypeError(f"{name}: expected {wanted}; got a keyword that {function}() does not have")
