"""Packed documents in one row of tokens, marked by cu_seq_lens_q and cu_seq_lens_k: none sees another."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from flashtile.api import attention, attention_packed
from flashtile.compat.transformers.selection import restrict
from flashtile.errors import ShapeError, UnsupportedError

# The last positions, their version and the result: all layers of a model get the same positions.
_last: tuple[weakref.ref[Tensor], int, Tensor | None] | None = None


def starts(positions: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Find the starts of documents: one row of tokens whose positions return to 0. None if there is only one."""
    global _last
    if query.shape[0] != 1 or query.shape[2] < 2 or query.shape[2] != key.shape[2]:
        return None
    if positions.shape != (1, query.shape[2]) or torch.compiler.is_compiling():
        return None
    if positions.is_meta or isinstance(positions, FakeTensor):  # these have no values
        return None
    changes = None if positions.is_inference() else positions._version  # inference tensors have no version
    if _last is None or _last[0]() is not positions or changes is None or _last[1] != changes:
        later = (positions[0, 1:] == 0).nonzero().flatten().to(torch.int32) + 1
        found = None
        if later.numel():
            found = torch.cat((later.new_zeros(1), later, later.new_full((1,), query.shape[2])))
        if changes is None:
            return found
        _last = weakref.ref(positions), changes, found
    return _last[2]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu: tuple[Tensor | None, Tensor | None],
    masked_by: str | None,
    with_lse: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the lse if wanted, of (batch, heads, rows, dim); starts count rows of the whole batch.

    masked_by: what the model's own mask includes, so that this mask must keep documents apart too.
    """
    cu_q, cu_k = cu
    if cu_q is None or cu_k is None:
        raise ShapeError("cu_seq_lens_q, cu_seq_lens_k: expected both or neither, got one of them")
    for name, x, of in (("cu_seq_lens_q", cu_q, query), ("cu_seq_lens_k", cu_k, key)):
        rows = of.shape[0] * of.shape[2]
        if x.is_cpu and not torch.compiler.is_compiling() and x.numel() and int(x[-1]) != rows:
            raise ShapeError(f"{name}: expected to end at {rows}, the rows given, got {int(x[-1])}")
    if "mask" in options or "bias" in options:  # these are for unpacked rows: add a mask of documents
        if "causal" in options and cu_q is not cu_k and not torch.equal(cu_q, cu_k):
            raise UnsupportedError(
                "cu_seq_lens_k: expected cu_seq_lens_q, because a position_bias is given, got other starts"
            )
        mine, theirs = _documents(cu_q, query), _documents(cu_k, key)
        same = (mine.unsqueeze(-1) == theirs.unsqueeze(-2)).unsqueeze(1)
        if masked_by is not None and ("mask" not in options or bool((options["mask"] & ~same).any())):
            raise UnsupportedError(
                f"cu_seq_lens_q: expected a mask that keeps documents apart, because of {masked_by} "
                "(give position_ids and use_cache=False), got one that does not"
            )
        restrict(options, same)
        found: Any = attention(query, key, value, layout="bhnd", return_lse=with_lse, **options)
        return found if with_lse else (found, None)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    found = attention_packed(q, k, v, cu_q, cu_k, return_lse=with_lse, **options)
    out, lse = found if with_lse else (found, None)
    shape = (query.shape[0], query.shape[2])
    return out.view(*shape, *out.shape[1:]).transpose(1, 2), None if lse is None else lse.view(*shape, -1).transpose(
        1, 2
    )


def _documents(cu: Tensor, x: Tensor) -> Tensor:
    """The document of each row, (batch, rows)."""
    rows = torch.arange(x.shape[0] * x.shape[2], device=cu.device, dtype=cu.dtype).view(x.shape[0], x.shape[2])
    return torch.bucketize(rows, cu[1:], right=True)
