"""torch's flex_attention and create_block_mask on flashtile: same arguments, same results, and gradients on a CPU."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

from flashtile.api import attention
from flashtile.checks.numbers import check_flag
from flashtile.compat.block_mask import BlockMask, create_block_mask, sliced_mask_mod
from flashtile.compat.errors import as_runtime_error, check_tensors
from flashtile.compat.layout import copy_layout, is_contiguous
from flashtile.compat.score_mod import recognized
from flashtile.errors import DTypeError, FlashtileError, ShapeError, UnsupportedError
from flashtile.pytorch.interception import can_skip_dispatcher

__all__ = ["AuxOutput", "AuxRequest", "BlockMask", "create_block_mask", "flex_attention"]
__all__ += ["and_masks", "create_mask", "noop_mask", "or_masks"]  # torch's own

try:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
except ImportError:  # torch before 2.9

    class AuxRequest(NamedTuple):  # type: ignore[no-redef]
        """Which results flex_attention() returns with the output."""

        lse: bool = False
        max_scores: bool = False

    class AuxOutput(NamedTuple):  # type: ignore[no-redef]
        """Those results."""

        lse: Tensor | None = None
        max_scores: Tensor | None = None


BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")
# Of arguments, in attention() and here.
NAMES = {"q": "query", "k": "key", "v": "value", "q, k, v": "query, key, value"}
_warned = False


class MismatchError(DTypeError, ValueError):
    """Tensors do not fit together; torch raises a ValueError."""


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Like torch's, for every score_mod that options of attention() can express; others raise an error that says why.

    These are softcap(score * number), a bias that depends on the position, such as ALiBi, and -inf for hidden pairs.
    block_mask comes from create_block_mask(), this one or torch's. kernel_options do not affect the result. The first
    query is aligned with the first key, as in torch. A query that sees no key gives 0, and an lse of -inf.
    """
    try:
        _check(query, key, value, block_mask, enable_gqa)
    except (AttributeError, TypeError):
        check_tensors(_check, query, key, value, block_mask, enable_gqa)
        raise
    mask = _as_block_mask(block_mask, query, key)
    if mask is not None and query.device != mask.device:
        raise RuntimeError(f"block_mask: expected one on {query.device}, like query, got one on {mask.device}")
    with_lse = _check_results(return_lse, return_aux)
    _check_kernel_options(kernel_options)

    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if score_mod is not None:
        if not callable(score_mod):
            raise DTypeError(f"score_mod: expected a function of (score, b, h, q_idx, kv_idx), got {score_mod!r}")
        options = _recognized(score_mod, mask, query, key, scale)
    else:
        options = {"scale": scale, **({} if mask is None else mask.seen.options())}
    if query.shape[0] != key.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    try:
        results: Any = attention(query, key, value, return_lse=with_lse, layout="bhnd", **options)
    except FlashtileError as error:
        raise as_runtime_error(error, NAMES) from None
    out, lse = results if with_lse else (results, None)
    if not is_contiguous(query):
        out = copy_layout(out, query)
    if lse is not None and 0 in lse.shape:
        lse = None  # as in torch
    if return_aux is not None:
        return out, AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="flashtile: a score_mod cannot be recognized inside a graph"
)
def _recognized(*arguments: Any) -> Any:
    return recognized(*arguments)


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="flashtile: use flashtile.compat.flex.create_block_mask, outside of the graph"
)
def _evaluated(block_mask: Any) -> Any:
    """A BlockMask whose mask_mod has been evaluated."""
    if not isinstance(block_mask, BlockMask):
        block_mask = BlockMask.from_torch(block_mask)
    block_mask.seen  # noqa: B018
    return block_mask


def _as_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> BlockMask | None:
    if block_mask is None:
        return None
    if not hasattr(block_mask, "mask_mod"):
        raise DTypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")
    if getattr(block_mask.mask_mod, "__name__", "") in (sliced_mask_mod.__name__, "_sliced_mask_mod_error"):
        raise RuntimeError("block_mask: expected a mask_mod, got a slice; set mask_mod and seq_lengths of the slice")
    n_q, n_k = block_mask.shape[-2:]
    if (n_q, n_k) != (query.shape[2], key.shape[2]):
        raise ShapeError(
            f"block_mask: expected one for {query.shape[2]} queries and {key.shape[2]} keys, "
            f"got one for {n_q} and {n_k}"
        )
    if not isinstance(block_mask, BlockMask) or block_mask._seen is None:
        block_mask = _evaluated(block_mask)
    found: BlockMask = block_mask
    if not torch.compiler.is_compiling() and can_skip_dispatcher((query,)) and found.is_outdated():
        raise RuntimeError(
            "block_mask: expected captured tensors and numbers as they were when its mask_mod was evaluated, got "
            "changed ones; create it again"
        )
    batch, heads = (1, 1, *found.shape[:-2])[-2:]
    if batch not in (1, query.shape[0]) or heads not in (1, query.shape[1]):
        raise ShapeError(
            f"block_mask: expected a batch of 1 or {query.shape[0]}, and 1 or {query.shape[1]} heads, "
            f"got {batch} and {heads}"
        )
    return found


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Check what torch checks, in its order."""
    tensors = {"query": query, "key": key, "value": value}
    if any(x.is_nested for x in tensors.values()):
        raise UnsupportedError(
            "query, key, value: expected dense tensors, got nested ones; attention_packed() takes them"
        )
    for name, x in tensors.items():
        if x.dtype != query.dtype:
            raise MismatchError(f"{name}: expected {query.dtype}, like query, got {x.dtype}")
        if x.device != query.device:
            raise MismatchError(f"{name}: expected a tensor on {query.device}, like query, got one on {x.device}")
        if x.ndim < 2:
            raise ShapeError(f"{name}: expected 4 axes, got shape {tuple(x.shape)}")
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(f"key: expected a head dim of {query.shape[-1]}, like query, got {key.shape[-1]}")
    for name, x in tensors.items():
        if x.ndim != 4:
            raise UnsupportedError(f"{name}: expected 4 axes, got shape {tuple(x.shape)}")
    batch, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
    if not check_flag("enable_gqa", enable_gqa) and heads != kv_heads:
        raise ShapeError(f"enable_gqa: expected True, because query has {heads} heads and key {kv_heads}, got False")
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(f"key: expected a number of heads that divides query's {heads}, got {kv_heads}")
    if batch != key.shape[0]:
        if block_mask is None or block_mask.shape[0] != batch:
            raise ShapeError(f"key: expected a batch of {batch}, unless block_mask has that batch, got {key.shape[0]}")
        if key.shape[0] != 1:
            raise RuntimeError(f"key: expected a batch of 1 or {batch}, got {key.shape[0]}")


def _check_results(return_lse: bool, return_aux: AuxRequest | None) -> bool:
    """Check which results are wanted; return whether the lse is one."""
    global _warned
    if return_aux is None:
        if check_flag("return_lse", return_lse) and not _warned and not torch.compiler.is_compiling():
            _warned = True
            warnings.warn(
                "return_lse is deprecated: use return_aux=AuxRequest(lse=True)", category=FutureWarning, stacklevel=3
            )
        return return_lse
    if return_lse:
        raise ShapeError("return_lse: expected False, because return_aux is given, got True")
    if return_aux.max_scores:
        raise UnsupportedError("return_aux: expected AuxRequest(lse=...), got max_scores=True, which is not computed")
    return return_aux.lse


def _check_kernel_options(options: Any) -> None:
    """Check the options of torch's kernels that it checks."""
    if not options:
        return
    for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX"):
        if name in options:
            raise AssertionError(f"kernel_options: expected no {name}")
    if "BACKEND" in options:
        if options.get("FORCE_USE_FLEX_ATTENTION"):
            raise RuntimeError("kernel_options: expected BACKEND or FORCE_USE_FLEX_ATTENTION, got both")
        if options["BACKEND"] not in BACKENDS:
            raise ShapeError(f"kernel_options: expected a BACKEND of {BACKENDS}, got {options['BACKEND']!r}")
