"""8-bit tensors: their factors side by side, and wider tensors for backends that do not multiply them as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.numerics.dtypes import EIGHT_BITS, fallback_dtype
from flashtile.problem import Problem

DTYPE: torch.dtype = getattr(torch, EIGHT_BITS)


def stack_factors(factors: tuple[Any, Any, Any], device: torch.device) -> Tensor:
    """Those of q, k and v: (batch, kv_heads, 3), or (1, 1, 3) where all are single numbers."""
    parts = [x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32, device=device) for x in factors]
    shapes = [x.shape for x in parts if x.ndim]  # torch.compile cannot follow next() before torch 2.9
    whole = shapes[0] if shapes else torch.Size((1, 1))
    return torch.stack([x if x.ndim else x.expand(whole) for x in parts], -1)


def widened(p: Problem) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v times their factors, in a wider type and the caller's layout; the options that change with them."""
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
    # What the wider type cannot be rounded to at once comes as float32.
    return wide, {"descale": None, "out_dtype": kind if p.out_dtype == kind else "float32"}


def _factor_of_rows(factor: Tensor, p: Problem, starts: Any, n: int) -> Tensor:
    """[sequences or 1, heads or 1] as what a tensor of rank 4 is multiplied with."""
    if not p.packed or factor.shape[0] == 1:
        return factor[:, :, None, None]
    ends = torch.as_tensor(starts[1:], device=factor.device)
    sequence = torch.searchsorted(ends, torch.arange(n, device=factor.device, dtype=ends.dtype), right=True)
    # Rows after the last end belong to no sequence. Nobody has looked at the starts yet: on a CPU the call with wider
    # tensors does, on a GPU nobody will, and an index out of bounds would be the end of all work there.
    sequence.clamp_(max=factor.shape[0] - 1)
    return factor[sequence].T[None, :, :, None]
