"""merge() on tensors: in one pass without gradients; with them differentiable torch code, also where torch traces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from flashtile.backends import gpu
from flashtile.checks.merge import check_memory
from flashtile.partials import merge_arrays
from flashtile.pytorch.bridge import to_numpy
from flashtile.pytorch.interception import can_skip_dispatcher, no_modes_active, skip_dynamo


def merge(results: tuple[Tensor, ...], into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Merge checked results over disjoint keys, each as out and lse, into the result over their union (eq. 8)."""
    tensors = results if into is None else (*results, *into)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch.compiler.is_compiling() or recorded or not (no_modes_active() and can_skip_dispatcher(tensors)):
        out, lse = _formula(*results)
        return (out.to(results[0].dtype), lse) if into is None else (into[0].copy_(out), into[1].copy_(lse))
    return _eager(results, into)


@skip_dynamo
def _eager(results: tuple[Tensor, ...], into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Merge tensors that hold their values, below autograd."""
    out, lse = _empty_like(results) if into is None else into
    if into is not None:
        check_memory(tuple(map(to_numpy, results)), (to_numpy(out), to_numpy(lse)))
    if out.is_cpu:
        merge_arrays([to_numpy(x) for x in results], (to_numpy(out), to_numpy(lse)), torch.get_num_threads())
    elif not _by_kernel(results, (out, lse)):
        for to, found in zip((out, lse), _formula(*results), strict=True):
            to.copy_(found)
    if into is not None:
        torch.autograd.graph.increment_version([x for x in into if not x.is_inference()])
    return out, lse


def _by_kernel(results: tuple[Tensor, ...], into: tuple[Tensor, Tensor]) -> bool:
    """Merge by one kernel on a GPU, if it can: Triton is there, and takes the layouts."""
    if not into[0].is_cuda or gpu.missing():
        return False
    from flashtile.backends.triton import merge_results

    return merge_results.merge(results, into)


def _empty_like(results: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Allocate what merge() returns: an out like the first one, and an lse without 16-bit sums."""
    out, lse = results[:2]
    kind = torch.float64 if any(x.dtype is torch.float64 for x in results[1::2]) else torch.float32
    contiguous = torch.contiguous_format
    return torch.empty_like(out, memory_format=contiguous), torch.empty_like(lse, dtype=kind, memory_format=contiguous)


def _formula(*results: Tensor) -> tuple[Tensor, Tensor]:
    """merge() in torch's own operations, without NaN in the gradients of rows that see no key, and an unrounded out."""
    outs, lses = results[::2], results[1::2]
    # As for NumPy: no 16-bit sums, and 64-bit sums of more than two results.
    lses = tuple(x.float() if x.element_size() < 4 else x for x in lses)
    kind = reduce(torch.promote_types, (x.dtype for x in lses))
    if len(outs) > 2:
        lses = tuple(x.double() for x in lses)
    # The result does not depend on the base, so neither do its gradients: a constant to autograd.
    m = reduce(torch.maximum, lses).detach()
    empty = m == -torch.inf
    base = m.masked_fill(empty, 0)
    weights = [(x - base).exp() for x in lses]
    total = reduce(torch.add, weights).masked_fill(empty, 1)
    seen = (x.masked_fill((lse == -torch.inf)[..., None], 0) for x, lse in zip(outs, lses, strict=True))
    out = reduce(torch.add, ((w / total)[..., None] * x for w, x in zip(weights, seen, strict=True)))
    return out, (base + total.log()).masked_fill(empty, -torch.inf).to(kind)
