"""merge() on tensors: in one pass without gradients; with them, or where torch traces, in torch's own operations."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flashtile.backends import gpu
from flashtile.checks.merge import check_memory
from flashtile.partials import merge_arrays
from flashtile.pytorch.bridge import to_numpy
from flashtile.pytorch.interception import can_skip_dispatcher, no_modes_active, skip_dynamo

Results = tuple[Tensor, ...]  # out, lse, out, lse, ...
Pair = tuple[Tensor, Tensor]


def merge(results: Results, into: Pair | None = None) -> Pair:
    """Merge checked results over disjoint keys into the result over their union (eq. 8)."""
    tensors = results if into is None else (*results, *into)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.compiler.is_compiling() or recorded or not (no_modes_active() and can_skip_dispatcher(tensors)):
        out, lse = _formula(results, _is_wide(tensors))
        if into is None:
            return out.to(results[0].dtype), lse.to(_lse_dtype(results))
        return into[0].copy_(out), into[1].copy_(lse)
    return _in_one_pass(results, into)


@skip_dynamo
def _in_one_pass(results: Results, into: Pair | None) -> Pair:
    """Merge tensors that hold their values, below autograd."""
    out, lse = _empty_like(results) if into is None else into
    views, to = tuple(map(to_numpy, results)), (to_numpy(out), to_numpy(lse))  # also of memory that only a GPU reads
    if into is not None:
        check_memory(views, to)
    if out.is_cpu:
        merge_arrays(views, to, torch.get_num_threads())
    elif not _by_kernel(results, (out, lse)):
        for x, found in zip((out, lse), _formula(results, _is_wide((*results, out, lse))), strict=True):
            x.copy_(found)
    if into is not None:
        torch.autograd.graph.increment_version([x for x in into if not x.is_inference()])
    return out, lse


def _by_kernel(results: Results, into: Pair) -> bool:
    """Merge by one kernel on a GPU, if there is one and it takes these tensors."""
    if not into[0].is_cuda or gpu.missing():
        return False
    from flashtile.backends.triton import merge_results

    return merge_results.merge(results, into)


def _empty_like(results: Results) -> Pair:
    """Allocate what merge() returns."""
    out, lse = results[:2]
    like: dict[str, Any] = {"memory_format": torch.contiguous_format}
    return torch.empty_like(out, **like), torch.empty_like(lse, dtype=_lse_dtype(results), **like)


def _lse_dtype(results: Results) -> torch.dtype:
    """An lse is not rounded to 16 bits."""
    return torch.float64 if any(x.dtype is torch.float64 for x in results[1::2]) else torch.float32


def _is_wide(tensors: Results) -> bool:
    return any(x.dtype is torch.float64 for x in tensors)


def _formula(results: Results, wide: bool) -> Pair:
    """merge() without rounding, and without NaN in the gradients of rows that see no key. wide: 64-bit sums."""
    outs, lses = results[::2], results[1::2]
    kind = torch.float64 if wide or len(outs) > 2 else torch.float32
    lses = tuple(x.to(kind) for x in lses)
    # The result does not depend on the base, so neither do its gradients: a constant to autograd.
    m = reduce(torch.maximum, lses).detach()
    empty = m == -torch.inf
    base = m.masked_fill(empty, 0)
    weights = [(x - base).exp() for x in lses]
    total = reduce(torch.add, weights).masked_fill(empty, 1)
    seen = (x.masked_fill((lse == -torch.inf)[..., None], 0) for x, lse in zip(outs, lses, strict=True))
    out = reduce(torch.add, ((w / total)[..., None] * x for w, x in zip(weights, seen, strict=True)))
    return out, (base + total.log()).masked_fill(empty, -torch.inf)
