"""The functions of flash_attn 2, computed by flashtile, on a CPU too.

Tensors are (batch, rows, heads, dim), or packed (rows, heads, dim) with cumulative sequence lengths. Windows and causal
are aligned at the end. With return_attn_probs the functions return (output, lse, weights), where weights are None
without dropout, and else the softmax, negative where dropped, with both sides rounded up to multiples of 128. The lse
of a row that sees no key is +inf here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention, attention_packed
from flashtile.checks.arguments import check_library, check_tensors
from flashtile.checks.numbers import check_flag
from flashtile.compat import weights
from flashtile.compat.errors import raise_runtime_errors
from flashtile.compat.kv_cache import (
    Cache,
    check_alike,
    check_integers,
    check_table,
    checked_cache,
    gather_pages,
    spans_after,
    zero_unused_pages,
)
from flashtile.compat.options import dropout_options
from flashtile.compat.rotary import rotate
from flashtile.errors import DTypeError, ShapeError, UnsupportedError
from flashtile.options import DEFAULTS
from flashtile.problem import describe
from flashtile.pytorch import calls, subclasses
from flashtile.spans import limits_of

Window = tuple[int, int]
UNLIMITED: Window = (-1, -1)
NAMES = {  # of arguments, in attention() and here
    "window": "window_size",
    "scale": "softmax_scale",
    "alibi": "alibi_slopes",
    "dropout": "dropout_p",
    "cu_q": "cu_seqlens_q",
    "cu_k": "cu_seqlens_k",
    "kv_lengths": "seqused_k",
    "return_lse": "return_attn_probs",
}
_flash_attn_errors = partial(raise_runtime_errors, names=NAMES)


@_flash_attn_errors
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    options = _options(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    _check_4d(q=q, k=k, v=v)
    found = _dense(q, k, v, return_attn_probs, options)
    if not return_attn_probs:
        return found
    return *found, weights.dense(q.transpose(1, 2), k.transpose(1, 2), options) if "dropout" in options else None


@_flash_attn_errors
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """qkv is (batch, rows, 3, heads, dim)."""
    q, k, v = _unbind("qkv", qkv, 3, 5)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *tail)


@_flash_attn_errors
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """kv is (batch, rows, 2, heads, dim)."""
    k, v = _unbind("kv", kv, 2, 5)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *tail)


@_flash_attn_errors
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """With a block_table k and v are pages, (pages, rows of a page, heads, dim), which are copied into one tensor.

    Two arguments are those of flash_attn's varlen_fwd() and of vLLM's function: seqused_k, the keys in use of each
    sequence (with a block_table, cu_seqlens_k may then be None), and out, which receives the output if no gradient is
    needed.
    """
    options = _options(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    if seqused_k is not None:
        options["kv_lengths"] = seqused_k
    if cu_seqlens_k is None and (seqused_k is None or block_table is None):
        raise ShapeError("cu_seqlens_k: expected a tensor, unless seqused_k and block_table are given, got None")
    if block_table is not None:
        named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        _check_memory(q, k=k, v=v, **named, block_table=block_table, seqused_k=seqused_k)
        _check_4d(k=k, v=v)
        check_alike("k", k, "v", v)
        for name, x in named.items():
            if x is not None:
                check_integers(name, x, cu_seqlens_q.shape[:1])
        check_table(block_table, cu_seqlens_q.shape[0] - 1)
        options.setdefault("kv_lengths", None if cu_seqlens_k is None else cu_seqlens_k.diff())
        block_table = zero_unused_pages(block_table, k, options["kv_lengths"])
        k, v = gather_pages(k, block_table), gather_pages(v, block_table)
        cu_seqlens_k = torch.arange(k.shape[0] + 1, dtype=cu_seqlens_q.dtype, device=k.device) * k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    _check_out(out, q, k, v)
    starts: tuple[Tensor, Any] = cu_seqlens_q, cu_seqlens_k
    found: Any = attention_packed(q, k, v, *starts, return_lse=return_attn_probs, **options)
    if not return_attn_probs:
        return found if out is None else out.copy_(found)
    result, lse = found
    dropped = weights.packed(q, k, *starts, max_seqlen_q, max_seqlen_k, options) if "dropout" in options else None
    return result if out is None else out.copy_(result), _their_lse(lse.T), dropped


@_flash_attn_errors
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """qkv is (rows, 3, heads, dim)."""
    q, k, v = _unbind("qkv", qkv, 3, 4)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *tail)


@_flash_attn_errors
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """kv is (rows, 2, heads, dim)."""
    k, v = _unbind("kv", kv, 2, 4)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *tail)


@_flash_attn_errors
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append new keys and values to the cache, in place, after cache_seqlens rows; q then sees all of it.

    As in flash_attn, nothing has a gradient. The cache is (batch, rows, heads, dim), where cache_batch_idx may select
    sequences; or pages, with a block_table.
    """
    q, k_cache, v_cache = (x.detach() if x.requires_grad else x for x in (q, k_cache, v_cache))
    k, v, rotary_cos, rotary_sin = (
        x.detach() if x is not None and x.requires_grad else x for x in (k, v, rotary_cos, rotary_sin)
    )
    options = _options(q, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False)
    if return_softmax_lse is not False:
        return_softmax_lse = check_flag("return_softmax_lse", return_softmax_lse)
    extra = {
        "k": k,
        "v": v,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
        "alibi_slopes": alibi_slopes,
    }
    if any(x is not None for x in extra.values()):  # otherwise attention() makes the same check
        _check_memory(q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens, **extra)
    _check_4d(q=q, k_cache=k_cache, v_cache=v_cache)
    check_alike("k_cache", k_cache, "v_cache", v_cache)
    for name, x, other, y in (("v", v, "k", k), ("rotary_sin", rotary_sin, "rotary_cos", rotary_cos)):
        if (x is None) != (y is None):
            raise ShapeError(f"{name}, {other}: expected both or neither, got one of them")
    new = None if k is None or v is None else (k, v)
    cache = checked_cache(q.shape[0], k_cache, v_cache, new, cache_seqlens, cache_batch_idx, block_table)
    if cache_leftpad is not None:
        options["spans"] = spans_after(cache_leftpad, q.shape[0], cache.capacity)
    if rotary_cos is not None and rotary_sin is not None:  # by rows of the cache, padding included
        angles: dict[str, Any] = {
            "cos": rotary_cos,
            "sin": rotary_sin,
            "lengths": cache.lengths,
            "interleaved": rotary_interleaved,
        }
        q = rotate(q, **angles, by_row=causal or "window" in options)
        new = None if new is None else (rotate(new[0], **angles, by_row=True), new[1])
    if new is not None:
        # Check before anything is written; a graph is checked when it is traced.
        checked = options | {"spans": limits_of(options.get("spans"))}
        if not (torch.compiler.is_compiling() or _is_cached(q, cache, checked)):
            like = (
                torch.empty((q.shape[0], cache.capacity, *x.shape[2:]), dtype=x.dtype, device="meta")
                for x in (k_cache, v_cache)
            )
            describe(*(x.transpose(1, 2) for x in (q, *like)), **checked)
        cache = cache.append(*new)
    return _dense(q, *cache.gather(), return_softmax_lse, {**options, "kv_lengths": cache.lengths})


def _is_cached(q: Tensor, cache: Cache, options: dict[str, Any]) -> bool:
    """Whether attention() has seen a call like this one, on a cache that is read in place."""
    if cache.table is not None or cache.slots is not None:
        return False
    given = {**options, "kv_lengths": cache.lengths}
    changed = {name: x for name, x in given.items() if x is not DEFAULTS[name]}
    keys, values = cache.gather()
    return calls.lookup(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), "auto", changed) is not None


def _options(
    q: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """Convert to options of attention()."""
    if isinstance(window_size, Tensor):
        window_size = window_size.tolist()
    if not isinstance(window_size, tuple | list) or len(window_size) != 2 or None in window_size:
        raise ShapeError(f"window_size: expected two numbers, (left, right), got {window_size!r}")
    left, right = (None if n < 0 else n for n in window_size)
    options: dict[str, Any] = {
        "causal": causal,
        "scale": softmax_scale,
        "softcap": softcap,
        **dropout_options(dropout_p, q),
    }
    if left is not None or right is not None:
        options["window"] = (left, right)
    if alibi_slopes is not None and q.dtype == torch.float64:
        subclasses.check_storage_if_eager({"alibi_slopes": alibi_slopes})
        alibi_slopes = alibi_slopes.double()  # flash_attn's are always float32
    return {**options, "alibi": alibi_slopes, "deterministic": deterministic}


def _unbind(name: str, x: Tensor, count: int, axes: int) -> tuple[Tensor, ...]:
    if x.ndim != axes or x.shape[-3] != count:
        raise ShapeError(f"{name}: expected {axes} axes, with {count} in the third-last, got shape {tuple(x.shape)}")
    return x.unbind(-3)


def _dense(q: Tensor, k: Tensor, v: Tensor, with_lse: bool, options: dict[str, Any]) -> Any:
    """The output, and the lse if wanted, of (batch, rows, heads, dim)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    found: Any = attention(q, k, v, return_lse=with_lse, layout="bhnd", **options)
    if not with_lse:
        return found.transpose(1, 2).contiguous()
    out, lse = found
    return out.transpose(1, 2).contiguous(), _their_lse(lse)


def _check_memory(q: Tensor, **others: Any) -> None:
    """Check that tensors read or written here are on q's device and store their values in plain memory."""
    tensors = {name: x for name, x in others.items() if isinstance(x, Tensor)}
    check_library(q, **tensors)
    check_tensors(q=q, **tensors)


def _check_4d(**given: Tensor) -> None:
    for name, x in given.items():
        if x.ndim != 4:
            raise ShapeError(f"{name}: expected 4 axes, (batch, rows, heads, dim), got shape {tuple(x.shape)}")


def _check_out(out: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that the caller's output tensor fits this call."""
    if out is None:
        return
    _check_memory(q, out=out)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UnsupportedError("out: expected None, because a gradient is needed, got a tensor")
    wanted = (*q.shape[:-1], *v.shape[-1:])
    if tuple(out.shape) != wanted:
        raise ShapeError(f"out: expected shape {wanted}, got {tuple(out.shape)}")
    if out.dtype != q.dtype or out.device != q.device:
        raise DTypeError(f"out: expected {q.dtype} on {q.device} like q, got {out.dtype} on {out.device}")


def _their_lse(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, torch.inf).float().contiguous()
