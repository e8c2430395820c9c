"""The arguments of calls by several ranks: made uniform, checked, and compared between ranks."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashtile.checks import layout as axes
from flashtile.checks import options as checks
from flashtile.checks.arguments import as_array, check_library
from flashtile.checks.keywords import check_keywords
from flashtile.checks.shapes import check_dtypes
from flashtile.distributed.shards import Shards
from flashtile.errors import DTypeError, ShapeError, UnsupportedError
from flashtile.numerics.dtypes import accumulator
from flashtile.options import DEFAULTS, OPTIONS, PLAIN_ARRAYS
from flashtile.pytorch import autocast, subclasses
from flashtile.spans import limits_of

PAIRED = ("mask", "bias")


class Arguments(NamedTuple):
    """A call of tensors of (batch, heads, rows, dim), with the options that differ from their defaults."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    ndim: int  # of the caller's q
    bnhd: bool


def prepare(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Arguments:
    """The arguments in one layout, after autocast. Checks only what this needs."""
    check_keywords("attention", options, {*DEFAULTS, "return_lse", "backend"})
    if not isinstance(q, Tensor):
        raise DTypeError(f"q: expected a torch tensor, got {type(q).__name__}")
    chosen: dict[str, Any] = {name: x for name, x in options.items() if x is not DEFAULTS[name]}
    if "kv_lengths" in chosen:
        chosen["kv_lengths"] = as_array("kv_lengths", chosen["kv_lengths"], q)
    names = [name for name in (*PLAIN_ARRAYS, "key_padding_mask") if name in chosen and name != "spans"]
    check_library(q, k=k, v=v, **{name: chosen[name] for name in names})
    tensors = {"q": q, "k": k, "v": v, **{name: chosen[name] for name in names}}
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise DTypeError(f"{name}: expected this rank's shard, a plain tensor, got a DTensor: use local_map")
    subclasses.check_plain(tensors)
    bnhd = axes.is_bnhd(chosen.pop("layout", None))
    ndim = q.ndim
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != ndim or not 2 + bnhd <= ndim <= 4:
            raise ShapeError(f"{name}: expected {'3' if bnhd else '2, 3'} or 4 axes, as q has, got {tuple(x.shape)}")
    if bnhd:
        q, k, v = axes.swap_axes(q, k, v)
    for _ in range(4 - ndim):
        q, k, v = q[None], k[None], v[None]
    if (padding := chosen.pop("key_padding_mask", None)) is not None:
        chosen["mask"] = _with_padding(chosen.get("mask"), padding)
    if "spans" in chosen:
        chosen["spans"] = limits_of(chosen["spans"])
    if torch.are_deterministic_algorithms_enabled() and not chosen.get("deterministic", False):
        chosen["deterministic"] = True
    if autocast.enabled(q):
        chosen = autocast.cast(q.device.type, {"q": q, "k": k, "v": v, **chosen})
        q, k, v = chosen.pop("q"), chosen.pop("k"), chosen.pop("v")
    return Arguments(q, k, v, chosen, ndim, bnhd)


def check(call: Arguments, backend: str, rows: int, columns: int, tokens: tuple[int, int]) -> None:
    """Check the arguments of one rank: q has so many rows, k and v so many; the whole, so many queries and keys."""
    q, k, v, options, *_ = call
    dtype = check_dtypes(q, k, v)
    if dtype == "float8_e4m3fn" or options.get("descale") is not None:
        raise UnsupportedError("q, k, v: expected floats of 16 bits or more: 8-bit inputs do not work across ranks")
    for name, x, n in (("q", q, rows), ("k", k, columns), ("v", v, columns)):
        if x.shape[2] != n:
            raise ShapeError(f"{name}: expected {n} tokens, those of this rank's shard, got shape {tuple(x.shape)}")
        if x.shape[0] != q.shape[0]:
            raise ShapeError(f"{name}: expected a batch of {q.shape[0]}, as q has, got {x.shape[0]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads or v.shape[1] != kv_heads:
        raise ShapeError(f"k: expected heads that divide {heads}, as many as v has, got {kv_heads} and {v.shape[1]}")
    if k.shape[3] != q.shape[3]:
        raise ShapeError(f"k: expected dim {q.shape[3]}, as q has, got {k.shape[3]}")
    check_library(q, **{name: x for name, x in options.items() if isinstance(x, Tensor) and name != "seed"})
    shapes = checks.Shapes(q, dtype, q.shape[0], heads, kv_heads, *tokens, None, None)
    for name, x in options.items():
        if name not in PAIRED:
            OPTIONS[name].check(name, x, shapes)
        elif x.ndim != 4 or x.shape[0] not in (1, q.shape[0]) or x.shape[1] not in (1, heads):
            raise ShapeError(f"{name}: expected (batch or 1, heads or 1, ..., ...), got {tuple(x.shape)}")
        if backend in OPTIONS[name].unsupported_by:
            raise UnsupportedError(f"{name}: the {backend} backend does not support it")
    if (mask := options.get("mask")) is not None and mask.dtype is not torch.bool:
        raise DTypeError(f"mask: expected booleans, True where a query may attend, got {mask.dtype}")
    if (bias := options.get("bias")) is not None and checks.name_of_any(bias.dtype) not in (dtype, accumulator(dtype)):
        raise DTypeError(f"bias: expected {dtype} or {accumulator(dtype)}, got {bias.dtype}")
    if (lengths := options.get("kv_lengths")) is not None:
        checks.check_lengths(lengths.cpu().numpy(), tokens[1])
    alibi = options.get("alibi")
    if alibi is not None and alibi.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError("alibi: expected slopes that need no gradient; a bias can have one")
    scale = q.shape[3] ** -0.5 if options.get("scale") is None else options["scale"]
    checks.check_scale_and_softcap(scale, options.get("softcap", 0.0), accumulator(dtype))


def check_shards(shards: Any, size: int) -> None:
    if not isinstance(shards, Shards):
        raise DTypeError(f"shards: expected a flashtile.distributed.Shards, got {type(shards).__name__}")
    if shards.ranks != size:
        raise ShapeError(f"shards: expected those of {size} ranks, the size of the group, got {shards.ranks}")


def facts(options: dict[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks, of options that they share; of masks and biases, their kinds."""
    found: dict[str, Any] = {}
    for name, x in options.items():
        if name == "threads":  # machines may have different ones
            continue
        if not isinstance(x, Tensor):
            found[name] = x
        elif name in PAIRED:
            found[name] = (x.dtype, *x.shape[:2])
        elif not x.is_cpu:
            found[name] = (x.dtype, tuple(x.shape))
        else:
            found[name] = (x.dtype, tuple(x.shape), x.tolist() if x.numel() < 64 else digest(x))
    return found


def digest(x: Tensor) -> str:
    """The contents of a tensor on the host, in short."""
    return blake2b(x.detach().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def _with_padding(mask: Any, padding: Any) -> Any:
    """The mask with a padding mask (batch, this rank's keys)."""
    if not isinstance(padding, Tensor) or padding.ndim != 2 or padding.dtype is not torch.bool:
        raise ShapeError(
            f"key_padding_mask: expected booleans, (batch, keys), got {getattr(padding, 'shape', padding)}"
        )
    padding = padding[:, None, None]
    if mask is None:
        return padding
    if mask.ndim != 4 or mask.shape[2] != 1:
        raise UnsupportedError("key_padding_mask: expected no mask of all pairs beside it")
    if mask.shape[3] != padding.shape[3]:
        raise ShapeError(f"key_padding_mask: expected {mask.shape[3]} keys, as mask has, got {padding.shape[3]}")
    return mask & padding
