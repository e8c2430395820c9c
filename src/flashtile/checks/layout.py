"""layout and key_padding_mask, applied before anything else: kernels see one layout and one mask."""

import warnings
from typing import Any

import numpy as np

from flashtile.checks.arguments import check_choice, check_library
from flashtile.checks.arguments import check_tensors as check_tensors
from flashtile.checks.shapes import broadcastable
from flashtile.errors import DTypeError, ShapeError
from flashtile.numerics.dtypes import name_of

LAYOUTS = ("bhnd", "bnhd")  # (batch, heads, length, dim) and (batch, length, heads, dim)
MAX_HEADS = 256  # more than any model has
_name_of: Any = name_of.__wrapped__  # without its cache, about which torch.compile warns


def is_bnhd(layout: Any) -> bool:
    """Check a layout; return whether lengths come before heads. None is "bhnd"."""
    if layout is None:
        return False
    check_choice("layout", layout, LAYOUTS)
    return bool(layout == "bnhd")


def swap_axes(*arrays: Any) -> tuple[Any, ...]:
    """Swap heads and rows of each array: (.., n, heads, d) <-> (.., heads, n, d); (n, d) has no heads."""
    return tuple(x.swapaxes(-3, -2) if len(getattr(x, "shape", ())) > 2 else x for x in arrays)


def swap_lse_axes(*arrays: Any) -> tuple[Any, ...]:
    return tuple(x.swapaxes(-2, -1) if len(getattr(x, "shape", ())) > 1 else x for x in arrays)


def with_padding(q: Any, k: Any, mask: Any, padding: Any) -> Any:
    """Return a mask that also hides padded keys."""
    check_library(q, k=k, mask=mask, key_padding_mask=padding)
    check_tensors(mask=mask, key_padding_mask=padding)
    if (kind := _name_of(padding.dtype)) != "bool":
        raise DTypeError(f"key_padding_mask: expected booleans, True where a key may be attended, got {kind}")
    if not 2 <= len(q.shape) == len(k.shape) <= 4:
        return mask  # describe() rejects these shapes
    batch, heads = (1, 1, *q.shape[:-2])[-2:]
    wanted = batch, k.shape[-2]
    if tuple(padding.shape) != wanted:
        raise ShapeError(f"key_padding_mask: expected shape {wanted}, (batch, keys), got {tuple(padding.shape)}")
    padding = padding[:, None, None]
    if mask is None:
        return padding
    if _name_of(mask.dtype) != "bool":
        return mask  # describe() rejects this dtype
    return broadcastable("mask", mask, (batch, heads, q.shape[-2], k.shape[-2]), True) & padding


def warn_if_axes_swapped(q: Any, k: Any, causal: bool, level: int) -> None:
    """Warn if the shapes look like (batch, length, heads, dim); level: the stack level of the warning.

    Read as (batch, heads, length, dim), such arrays have equal numbers of query and key heads, more heads than rows,
    and as many keys as queries, or a fraction of them with grouped heads. Real shapes are rarely like that if there
    are also more heads than in any model, or rows that causal leaves without a key.
    """
    if len(q.shape) != 4 or len(k.shape) != 4:
        return
    (_, heads, n_q, _), (_, kv_heads, n_k, _) = q.shape, k.shape
    if not all(isinstance(n, int) for n in (heads, n_q, kv_heads, n_k)):  # a comparison of symbols would add a guard
        return
    if heads != kv_heads or not heads > n_q >= n_k >= 1 or n_q % n_k:
        return
    if heads > MAX_HEADS >= n_q:
        reading = f"{heads} heads of {n_q} queries"
    elif causal and n_q > n_k:
        reading = f"{heads} heads, with {n_q - n_k} of {n_q} queries left without a key by causal"
    else:
        return
    warnings.warn(
        f"q: expected (batch, heads, length, dim), got {tuple(q.shape)}, which would be {reading}; "
        'pass layout="bnhd" for (batch, length, heads, dim), or layout="bhnd" if the shape is right',
        stacklevel=level,
    )


def swap_results(results: Any, with_lse: bool) -> Any:
    """Swap the axes of attention()'s results back, and make them contiguous."""
    out, lse = results if with_lse else (results, None)
    out = _contiguous(*swap_axes(out))
    return (out, _contiguous(*swap_lse_axes(lse))) if with_lse else out


def _contiguous(x: Any) -> Any:
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()
