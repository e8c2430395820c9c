"""8-bit tensors: their stacked factors, and wider tensors for backends that do not multiply them directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.numerics.dtypes import EIGHT_BITS, fallback_dtype
from flashtile.problem import Problem

DTYPE: torch.dtype = getattr(torch, EIGHT_BITS)


def stack_factors(factors: tuple[Any, Any, Any], device: torch.device) -> Tensor:
    """Stack the factors of q, k and v: (batch, kv_heads, 3), or (1, 1, 3) if all are single numbers."""
    parts = [x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32, device=device) for x in factors]
    shapes = [x.shape for x in parts if x.ndim]  # torch.compile cannot trace next() before torch 2.9
    whole = shapes[0] if shapes else torch.Size((1, 1))
    return torch.stack([x if x.ndim else x.expand(whole) for x in parts], -1)


def widened(p: Problem) -> tuple[list[Tensor], dict[str, Any]]:
    """Return q, k and v times their factors, in a wider dtype and the caller's layout, and the changed options."""
    kind = fallback_dtype(p.q.device.type)
    wide = []
    for n, x in enumerate((p.q, p.k, p.v)):
        real = x.to(torch.float32)
        if p.descale is not None:
            factor = p.descale[:, :, n]  # [sequences or 1, kv_heads or 1]
            if n == 0 and factor.shape[1] > 1:
                factor = factor.repeat_interleave(p.group, 1)
            real = real * _factor_of_rows(factor, p, p.cu_q if n == 0 else p.cu_k, x.shape[2])
        wide.append(p.in_caller_layout(real.to(getattr(torch, kind))))
    # An out_dtype other than the wider dtype is rounded from float32.
    return wide, {"descale": None, "out_dtype": kind if p.out_dtype == kind else "float32"}


def _factor_of_rows(factor: Tensor, p: Problem, starts: Any, n: int) -> Tensor:
    """Expand [sequences or 1, heads or 1] to broadcast with a tensor of rank 4."""
    if not p.packed or factor.shape[0] == 1:
        return factor[:, :, None, None]
    ends = torch.as_tensor(starts[1:], device=factor.device)
    sequence = torch.searchsorted(ends, torch.arange(n, device=factor.device, dtype=ends.dtype), right=True)
    # Rows after the last end belong to no sequence. The starts are unchecked: on a CPU the call with wider tensors
    # checks them, on a GPU nothing does, and there an index out of bounds would end the CUDA context.
    sequence.clamp_(max=factor.shape[0] - 1)
    return factor[sequence].T[None, :, :, None]
