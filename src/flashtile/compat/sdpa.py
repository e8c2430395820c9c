"""torch's scaled_dot_product_attention on flashtile: same arguments, same results, no NaN from masked pairs."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention, attention_packed
from flashtile.band import Band
from flashtile.checks.numbers import check_flag
from flashtile.checks.shapes import MAX_DIM
from flashtile.compat.errors import as_runtime_error, check_tensors
from flashtile.compat.layout import copy_layout, is_contiguous
from flashtile.compat.options import dropout_options, mask_options
from flashtile.errors import DTypeError, FlashtileError, ShapeError
from flashtile.pytorch import subclasses
from flashtile.pytorch.interception import reject_shards
from flashtile.pytorch.operators import LIBRARY

TORCH_SDPA = torch._C._nn.scaled_dot_product_attention  # torch's own, even if torch.nn.functional has been patched
_warned: set[str] = set()
NAMES = {  # of arguments, here and in attention()
    "q": "query",
    "k": "key",
    "v": "value",
    "q, k, v": "query, key, value",
    "mask": "attn_mask",
    "bias": "attn_mask",
    "dropout": "dropout_p",
}

QKV = tuple[Tensor, Tensor, Tensor]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Like torch's: is_causal aligns the first query and key, while attention() aligns the last ones.

    Calls that flashtile has no kernel for go to torch's own function, with a warning once per reason.
    """
    try:
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except FlashtileError as error:
        raise as_runtime_error(error, NAMES) from None
    except (AttributeError, TypeError):
        check_tensors(_attend, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        raise


# torch.jit.script cannot compile the function, so it gets an operator.
LIBRARY.define(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, float? scale=None, bool enable_gqa=False) -> Tensor"
)
LIBRARY.impl("scaled_dot_product_attention", scaled_dot_product_attention, "CompositeImplicitAutograd")
torch.jit._builtins._register_builtin(scaled_dot_product_attention, "flashtile::scaled_dot_product_attention")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if is_causal.__class__ is not bool or enable_gqa.__class__ is not bool:
        is_causal, enable_gqa = _flag("is_causal", is_causal), _flag("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise ShapeError("is_causal: expected False, because attn_mask is given, got True")
    if scale.__class__ is not float and isinstance(scale, Tensor):
        scale = _number(scale)
    nested = query.is_nested or key.is_nested or value.is_nested
    if nested:
        reason = _unsupported_nested(query, key, value, dropout_p)
    else:
        shape, k, v = query.shape, key.shape, value.shape
        reason = _unsupported(shape, v, dropout_p)
    if reason is not None:
        given = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return _fall_back(reason, (query, key, value), attn_mask, given)
    options: dict[str, Any] = {"scale": scale, **dropout_options(dropout_p, query)}
    if is_causal:
        options["band"] = Band(right=0)
    if nested:
        return _nested(query, key, value, attn_mask, enable_gqa, options)
    layout_of = None  # a query in whose order of axes torch returns the output; None: contiguous
    if not is_contiguous(query) and _keeps_layout(query, key, value, attn_mask, dropout_p, enable_gqa):
        layout_of = query
    if k != v or not len(shape) == 4 == len(k) or shape[0] != k[0] or shape[1] != k[1]:  # usually the shapes are equal
        query, key, value = _broadcast(query, key, value, enable_gqa)
        shape = query.shape
    if attn_mask is not None:
        options |= _mask(attn_mask, query, k[-2])
    if len(shape) > 4:
        query, key, value = (x.flatten(0, -4) for x in (query, key, value))
    out: Tensor = attention(query, key, value, layout="bhnd", **options)
    if len(shape) > 4:
        return out.contiguous().view(*shape[:-3], *out.shape[1:])
    return out.contiguous() if layout_of is None else copy_layout(out, layout_of)


def _flag(name: str, value: Any) -> bool:
    return bool(value) if isinstance(value, torch.SymBool) else check_flag(name, value)


def _number(scale: Tensor) -> float:
    if scale.ndim or scale.requires_grad:
        raise DTypeError("scale: expected a number, or a 0-d tensor without requires_grad, got another tensor")
    return float(scale.item())


def _unsupported(query: torch.Size, value: torch.Size, dropout_p: float) -> str | None:
    """Why no kernel here takes tensors of these shapes, if torch does; else None."""
    if len(query) < 2 or len(value) < 2:
        name, shape = ("query", query) if len(query) < 2 else ("value", value)
        raise ShapeError(f"{name}: expected 2 axes or more, got shape {tuple(shape)}")
    dim, dim_v = query[-1], value[-1]
    if dim > MAX_DIM or dim_v > MAX_DIM:
        return f"a head dim is over {MAX_DIM}"
    if dim == 0 or dim_v == 0:
        return "a head dim is 0"
    empty = not torch.compiler.is_compiling() and (0 in query or 0 in value)  # in a graph each check would add a guard
    if empty and 0 in (*query[-3:-2], *value[-3:-2]):
        return "there are no heads"
    return "every weight is dropped" if dropout_p == 1 else None


def _unsupported_nested(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> str | None:
    """The same for nested tensors."""
    layouts = {x.layout if x.is_nested else None for x in (query, key, value)}
    if layouts == {torch.strided}:
        return "tensors are nested, but not of layout torch.jagged"
    return _unsupported(query.shape, value.shape, dropout_p) if layouts == {torch.jagged} else None


def _fall_back(reason: str, qkv: QKV, attn_mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    reject_shards()
    if reason not in _warned and not torch.compiler.is_compiling():
        _warned.add(reason)
        warnings.warn(
            f"scaled_dot_product_attention: torch's own is called because {reason}; flashtile has no kernel for it",
            stacklevel=4,
        )
    if attn_mask is not None:
        attn_mask = _at_least_2d(subclasses.materialized(attn_mask, qkv[0].device))
    out: Tensor = TORCH_SDPA(*qkv, attn_mask, **options)
    return out


def _broadcast(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> QKV:
    """Broadcast leading axes as torch does; keys and values may have a divisor of the number of query heads."""
    q, k, v = query.shape, key.shape, value.shape
    if len(k) < 2:
        raise ShapeError(f"key: expected 2 axes or more, got shape {tuple(k)}")
    if q[:-3] == k[:-3] == v[:-3] and (q[-3:-2] == k[-3:-2] == v[-3:-2] or (grouped and k[-3:-2] == v[-3:-2])):
        return query, key, value
    if grouped:
        key, value = _same_heads(query, key, value)
        if q[:-3] == k[:-3] == v[:-3]:
            return query, key, value
        k, v, begin = key.shape, value.shape, -3
    else:
        begin = -2
        several = [x[-3] for x in (q, k, v) if len(x) > 2 and x[-3] != 1]  # not a set: symbols have no hash
        if min(len(q), len(k), len(v)) > 2 and any(n != several[0] for n in several):
            heads = f"query, key and value have {q[-3]}, {k[-3]} and {v[-3]} heads"
            raise ShapeError(f"enable_gqa: expected True, because {heads}, got False")
    try:
        lead = tuple(torch.broadcast_shapes(q[:begin], k[:begin], v[:begin]))  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = ", ".join(str(tuple(x)) for x in (q, k, v))
        raise ShapeError(f"query, key, value: expected leading axes that broadcast, got shapes {shapes}") from None
    key_lead = lead
    if not grouped and len(lead) > 0 and all(len(x) < 3 or x[-3] == 1 for x in (k, v)):
        key_lead = (*lead[:-1], 1)  # leave one key head for all query heads unexpanded
    return (
        query.expand(*lead, *q[begin:]),
        key.expand(*key_lead, *k[begin:]),
        value.expand(*key_lead, *v[begin:]),
    )


def _same_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values until both have the same number of heads, a divisor of the query's."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ShapeError(f"{name}: expected 3 axes or more, because enable_gqa is given, got {tuple(x.shape)}")
        if not x.shape[-3] or query.shape[-3] % x.shape[-3]:
            found = f"{query.shape[-3]}, got {x.shape[-3]}"
            raise ShapeError(f"{name}: expected a number of heads that divides query's {found}")
    if key.shape[-3] == value.shape[-3]:
        return key, value
    heads = query.shape[-3]  # fewer might do, but symbols have no lcm
    return key.repeat_interleave(heads // key.shape[-3], -3), value.repeat_interleave(heads // value.shape[-3], -3)


def _at_least_2d(mask: Tensor) -> Tensor:
    """Prepend axes to a mask of fewer than two, which broadcasts to the scores' last axes."""
    return mask if mask.ndim > 1 else mask[(None,) * (2 - mask.ndim)]


def _mask(mask: Tensor, query: Tensor, n_k: int) -> dict[str, Any]:
    """Convert a mask to options of attention()."""
    shape = query.shape
    if type(mask) is not Tensor:
        last = subclasses.is_lower_right(mask, shape[-2], n_k)
        if last is not None:
            return {"causal": True} if last else {"band": Band(right=0)}
    if type(mask) is not Tensor or mask.layout is not torch.strided or mask.is_nested:
        subclasses.check_plain({"attn_mask": mask})
    mask = _at_least_2d(mask)
    if mask.dtype is torch.float32 and query.dtype is torch.float64:  # torch takes float32 masks with any queries
        mask = mask.double()
    if len(shape) > 4 and mask.ndim > 3:
        lead = shape[:-3]
        try:
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
        except RuntimeError:
            wanted, got = (*shape[:-1], n_k), tuple(mask.shape)
            raise ShapeError(f"attn_mask: expected a shape that broadcasts to {wanted}, got {got}") from None
    elif mask.ndim == 2 and (
        len(shape) > 4 or (len(shape) == 4 and (torch.compiler.is_compiling() or shape[-2] == shape[-4] > 1))
    ):
        mask = mask[None, None]  # (queries, keys) here, never (batch, keys)
    return mask_options("attn_mask", mask)


def _keeps_layout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, grouped: bool
) -> bool:
    """Whether torch's output has the memory layout of the query; otherwise it is contiguous.

    Its fused kernels keep the layout. They do not broadcast, and on a CPU they take neither dropout nor a mask that has
    three axes or requires a gradient.
    """
    if query.ndim != 4 or query.shape[-1] != value.shape[-1] or not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if key.shape[1] != value.shape[1] or (key.shape[1] != query.shape[1] and not grouped):
        return False
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return False
    return not query.is_cpu or (dropout_p == 0 and (mask is None or (mask.ndim != 3 and not mask.requires_grad)))


def _nested(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool, options: dict[str, Any]
) -> Tensor:
    """Attention of nested tensors: sequences of different lengths."""
    if mask is not None:
        raise DTypeError("attn_mask: expected None, because query is nested, got a mask")
    if all(subclasses.ragged_heads(x) for x in (query, key, value)):
        inner: Tensor = attention(query.values(), key.values(), value.values(), layout="bhnd", **options)
        return subclasses.nested_like(inner, query)
    (q, starts), (k, k_starts), (v, v_starts) = (
        subclasses.jagged_rows(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    if v_starts is not k_starts and not torch.equal(v_starts, k_starts):
        raise ShapeError("value: expected the sequence lengths of key, got others")
    if not grouped and q.shape[1] != k.shape[1]:
        heads = f"query and key have {q.shape[1]} and {k.shape[1]} heads"
        raise ShapeError(f"enable_gqa: expected True, because {heads}, got False")
    return subclasses.to_nested(attention_packed(q, k, v, starts, k_starts, **options), query)
