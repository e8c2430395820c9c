"""Tensors on the CPU <-> NumPy arrays, the same memory both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashtile.dtypes import BFLOAT16, Array


def to_numpy(x: Any) -> Any:
    """A view of a CPU tensor; bfloat16, which NumPy lacks, as flashtile's record of its bits."""
    x = x.detach() if x.requires_grad else x
    return x.view(torch.uint16).numpy().view(BFLOAT16) if x.dtype is torch.bfloat16 else x.numpy()


def to_torch(x: Array) -> torch.Tensor:
    """A contiguous tensor over the memory of an array (copied only where the array is not contiguous)."""
    x = np.ascontiguousarray(x)
    return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)
