"""Keys that an indexer chose for each query, as a mask beside the model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def restrict(options: dict[str, Any], keep: Tensor) -> None:
    """Let the options hide all but these as well."""
    options["mask"] = options["mask"] & keep if "mask" in options else keep


def selected(indices: Tensor | None, blocks: Tensor | None, module: Any, heads: int, keys: int) -> Tensor:
    """True where chosen: keys, (batch, queries, chosen), for all heads; or blocks of keys, for each group of heads."""
    if blocks is None:
        assert indices is not None
        return _marked(indices, keys).unsqueeze(1)
    size: int = module.indexer.block_size
    found = _marked(blocks, -(-keys // size)).repeat_interleave(size, dim=-1)[..., :keys]
    return found.repeat_interleave(heads // found.shape[1], dim=1)


def _marked(chosen: Tensor, count: int) -> Tensor:
    """What is no number below count stands for nothing."""
    chosen = chosen.long()
    chosen = chosen.where((chosen >= 0) & (chosen < count), count)
    found = torch.zeros((*chosen.shape[:-1], count + 1), dtype=torch.bool, device=chosen.device)
    return found.scatter_(-1, chosen, True)[..., :count]
