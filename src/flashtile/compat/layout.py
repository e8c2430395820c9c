"""The layout of an output in memory: that of the query, as in torch."""

from itertools import pairwise

import torch
from torch import Tensor


def is_contiguous(query: Tensor) -> bool:
    """Whether the query is contiguous; in a graph, whether its axes are known to be in memory order."""
    if not torch.compiler.is_compiling():
        return query.is_contiguous()
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    strides = query.stride()[:-1]
    return not any(guard_or_false(a < b) for a, b in pairwise(strides))


def copy_layout(out: Tensor, query: Tensor) -> Tensor:
    """Copy the output to the query's order of axes in memory, or to that of a copy if the query's axes overlap."""
    strides = query.stride()
    if 0 in strides:
        strides = torch.empty_like(query, device="meta").stride()
    order = sorted(range(3), key=strides.__getitem__, reverse=True)
    if order == [0, 1, 2]:
        return out
    back = [order.index(axis) for axis in range(3)]
    return out.permute(*order, 3).contiguous().permute(*back, 3)
