"""flashtile.distributed.attention(): exact attention of this rank's queries to the keys of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from flashtile.checks import layout as axes
from flashtile.checks.arguments import as_array, check_library
from flashtile.checks.keywords import check_keywords
from flashtile.checks.numbers import check_flag
from flashtile.distributed import operators
from flashtile.distributed.groups import process_group
from flashtile.distributed.plan import Heads, Method
from flashtile.distributed.shards import Shards
from flashtile.errors import DTypeError, ShapeError, UnsupportedError
from flashtile.options import DEFAULTS
from flashtile.pytorch import autocast
from flashtile.pytorch.operands import operands
from flashtile.spans import limits_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flashtile.options import LayoutOptions

MOST_GATHERED = 1 << 30  # bytes of keys and values that "auto" gathers; beyond it takes the ring
METHODS = ("auto", "gather", "ring", "ulysses")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    shards: Shards,
    method: str | tuple[int, int] = "auto",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[LayoutOptions],
) -> Any:
    """Compute attention of this rank's queries to the keys of all ranks, exactly, with gradients.

    q, k and v are this rank's shards of (batch, heads, tokens, dim), and so is the result. Every rank of the group
    calls this with the same options.

    group       a ProcessGroup, or a DeviceMesh of one axis, such as mesh["cp"]; by default, all ranks
    shards      which tokens each rank holds; tokens of different documents do not see each other
    method      "gather": the keys that a rank's queries see are gathered. "ring": blocks of keys go from rank to rank,
                while each computes; memory does not grow with the ranks. "ulysses": heads are exchanged for tokens.
                (a, b): ulysses in groups of a neighbouring ranks, and a ring over b groups. "auto": ulysses if it
                sends least, else gather, or the ring if keys and values take more than 1 GiB

    All options of flashtile.attention() mean what they mean there for the whole sequence: causal, window and spans
    count over the tokens of all ranks, dropout drops the same weights. A mask or bias is (batch, heads, 1, this rank's
    tokens), one number for each key, or (batch, heads, this rank's tokens, all tokens). What all ranks share (spans,
    alibi, sink, kv_lengths, seed) is the same on each, and so is the gradient of the sink: that of the sum of all
    ranks' losses.
    """
    check_keywords("attention", options, {*DEFAULTS, "return_lse", "backend"})
    return_lse = check_flag("return_lse", return_lse)
    if not isinstance(q, torch.Tensor):
        raise DTypeError(f"q: expected a torch tensor, got {type(q).__name__}")
    chosen: dict[str, Any] = {name: x for name, x in options.items() if x is not DEFAULTS[name]}
    bnhd = axes.is_bnhd(chosen.pop("layout", None))
    if bnhd:
        q, k, v = axes.swap_axes(q, k, v)
    rank_of_q = q.ndim
    q, k, v = (x[(None,) * (4 - x.ndim)] if x.ndim in (2, 3) else x for x in (q, k, v))
    if (padding := chosen.pop("key_padding_mask", None)) is not None:
        chosen["mask"] = _with_padding(chosen.get("mask"), padding)
    if "spans" in chosen:
        chosen["spans"] = limits_of(chosen["spans"])
    if "kv_lengths" in chosen:
        chosen["kv_lengths"] = as_array("kv_lengths", chosen["kv_lengths"], q)
    if autocast.enabled(q):
        chosen = autocast.cast(q.device.type, {"q": q, "k": k, "v": v, **chosen})
        q, k, v = chosen.pop("q"), chosen.pop("k"), chosen.pop("v")
    if torch.are_deterministic_algorithms_enabled() and not chosen.get("deterministic", False):
        chosen["deterministic"] = True
    group = process_group(dist.group.WORLD if group is None else group)
    rank, size = group.rank(), group.size()
    _check(q, k, v, shards, rank, size, chosen)
    split = _method(method, size, shards, q, k, v, chosen)
    within = rank % split.ulysses
    heads, kv_heads = q.shape[1], k.shape[1]
    own = Heads(heads * within // split.ulysses, heads * (within + 1) // split.ulysses, heads // kv_heads)
    first = rank - within
    rows = sum(shards.counts[first : first + split.ulysses])
    sizes = [rows, own.n, own.keys.stop - own.keys.start]
    code = torch.from_numpy(shards.code)
    out, lse, *_ = operators.FORWARD(
        *operands(q, k, v, backend, chosen), group.group_name, code, split.ulysses, split.ring, split.gather, sizes
    )
    for _ in range(4 - rank_of_q):
        out, lse = out[0], lse[0]
    results = (out, lse) if return_lse else out
    return axes.swap_results(results, return_lse) if bnhd else results


def _check(q: Any, k: Any, v: Any, shards: Any, rank: int, size: int, options: dict[str, Any]) -> None:
    arrays = {name: x for name, x in options.items() if isinstance(x, torch.Tensor) and name != "seed"}
    check_library(q, k=k, v=v, **arrays)
    if not isinstance(shards, Shards):
        raise DTypeError(f"shards: expected a flashtile.distributed.Shards, got {type(shards).__name__}")
    if shards.ranks != size:
        raise ShapeError(f"shards: expected those of {size} ranks, the size of the group, got {shards.ranks}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ShapeError(f"{name}: expected (batch, heads, tokens, dim), got {x.ndim} axes")
        if x.shape[2] != shards.counts[rank]:
            raise ShapeError(
                f"{name}: expected {shards.counts[rank]} tokens, those of rank {rank}, got shape {tuple(x.shape)}"
            )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ShapeError(f"k: expected heads that divide {q.shape[1]}, as v has, got {k.shape[1]} and {v.shape[1]}")
    if options.get("descale") is not None:
        raise UnsupportedError("descale: 8-bit inputs are not supported across ranks")
    for name in ("mask", "bias"):
        if options.get(name) is not None and options[name].ndim != 4:
            raise ShapeError(f"{name}: expected four axes, got shape {tuple(options[name].shape)}")
    alibi = options.get("alibi")
    if alibi is not None and alibi.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError("alibi: expected slopes that need no gradient; a bias can have one")


def _method(method: Any, size: int, shards: Shards, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Method:
    """How a call is split."""
    of_pairs = any(options.get(name) is not None and options[name].shape[2] != 1 for name in ("mask", "bias"))
    if method == "auto":
        heads, kv_heads = q.shape[1], k.shape[1]
        if size > 1 and not of_pairs and kv_heads % size == 0 and heads + kv_heads <= kv_heads * size:
            return Method(size, 1)
        gathered = shards.tokens * k.shape[0] * kv_heads * (k.shape[3] + v.shape[3]) * k.element_size()
        return Method(1, size, gathered <= MOST_GATHERED)
    if method in ("gather", "ring"):
        return Method(1, size, method == "gather")
    found = Method(size, 1) if method == "ulysses" else Method(*method) if isinstance(method, tuple) else None
    if found is None or found.ulysses < 1 or found.ulysses * found.ring != size:
        raise ShapeError(
            f"method: expected {', '.join(METHODS)}, or two sizes whose product is {size}, the ranks, got {method!r}"
        )
    if of_pairs and found.ulysses > 1:
        name = "mask" if options.get("mask") is not None else "bias"
        raise UnsupportedError(
            f"{name}: expected (batch, heads, 1, keys) for {found}, which exchanges heads for tokens, got one of all "
            "pairs: use gather or ring"
        )
    return found


def _with_padding(mask: Any, padding: Any) -> Any:
    """The mask with a padding mask (batch, this rank's keys)."""
    if padding.ndim != 2 or padding.dtype is not torch.bool:
        raise ShapeError(f"key_padding_mask: expected booleans, (batch, keys), got shape {tuple(padding.shape)}")
    padding = padding[:, None, None]
    if mask is None:
        return padding
    if mask.shape[2] != 1:
        raise UnsupportedError("key_padding_mask: expected no mask of all pairs beside it")
    return mask & padding
