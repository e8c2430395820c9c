"""merge() on tensors: differentiable torch code, without NaN in the gradients of rows that see no key."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def merge(*results: Tensor) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint keys, each as out and lse, into the result over their union (eq. 8).

    (0, -inf) is the identity.
    """
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
    out = reduce(torch.add, ((w / total)[..., None] * x for w, x in zip(weights, outs, strict=True)))
    return out.to(outs[0].dtype), (base + total.log()).masked_fill(empty, -torch.inf).to(kind)
