"""merge() on tensors: plain differentiable torch, and no NaN in the gradients of rows that saw nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two finished results over disjoint keys -> the result over their union (eq. 8); (0, -inf) is the identity."""
    # As NumPy does it: no sums in 16 bits.
    lse_a, lse_b = (x.float() if x.element_size() < 4 else x for x in (lse_a, lse_b))
    # The result does not depend on the base, so neither do its gradients: a constant to autograd.
    m = torch.maximum(lse_a, lse_b).detach()
    empty = m == -torch.inf
    base = m.masked_fill(empty, 0)
    a, b = (lse_a - base).exp(), (lse_b - base).exp()
    total = (a + b).masked_fill(empty, 1)
    out = (a / total)[..., None] * out_a + (b / total)[..., None] * out_b
    return out.to(out_a.dtype), (base + total.log()).masked_fill(empty, -torch.inf)
