"""Packed documents in one row of tokens, marked by cu_seq_lens_q and cu_seq_lens_k: none sees another."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from flashtile.api import attention, attention_packed
from flashtile.errors import ShapeError, UnsupportedError
from flashtile.spans import Spans

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
    if "mask" in options or "bias" in options or "spans" in options:  # for unpacked rows: add spans of documents
        if "causal" in options and cu_q is not cu_k and not torch.equal(cu_q, cu_k):
            raise UnsupportedError(
                "cu_seq_lens_k: expected cu_seq_lens_q, because a position_bias is given, got other starts"
            )
        apart = _documents(cu_q, cu_k, query, key)
        if masked_by is not None and not _keeps_apart(options, apart, key.shape[2]):
            raise UnsupportedError(
                f"cu_seq_lens_q: expected a mask that keeps documents apart, because of {masked_by} "
                "(give position_ids and use_cache=False), got one that does not"
            )
        options["spans"] = apart & options["spans"] if "spans" in options else apart
        found: Any = attention(query, key, value, layout="bhnd", return_lse=with_lse, **options)
        return found if with_lse else (found, None)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    found = attention_packed(q, k, v, cu_q, cu_k, return_lse=with_lse, **options)
    out, lse = found if with_lse else (found, None)
    shape = (query.shape[0], query.shape[2])
    return out.view(*shape, *out.shape[1:]).transpose(1, 2), None if lse is None else lse.view(*shape, -1).transpose(
        1, 2
    )


def _documents(cu_q: Tensor, cu_k: Tensor, query: Tensor, key: Tensor) -> Spans:
    """Each query sees the keys of its document, within its row of the batch."""
    batch, rows = query.shape[0], query.shape[2]
    at = torch.arange(batch * rows, device=cu_q.device, dtype=cu_q.dtype)
    mine = torch.bucketize(at, cu_q[1:], right=True).view(batch, 1, rows)
    first = torch.arange(batch, device=cu_k.device).view(batch, 1, 1) * key.shape[2]
    return Spans(cu_k[mine] - first, cu_k[mine + 1] - first)


def _keeps_apart(options: dict[str, Any], apart: Spans, keys: int) -> bool:
    """Whether what the model itself hides includes all pairs of different documents."""
    if "mask" in options and not bool((options["mask"] & ~apart.to_mask(keys)).any()):
        return True
    if "spans" not in options:
        return False
    both, mine = (x.limits.long().clamp(max=keys) for x in (apart & options["spans"], options["spans"]))
    counts = [(x[..., 1] - x[..., 0]).sum(-1) for x in (both, mine)]
    return bool((counts[0] == counts[1]).all())
