"""Keys that an indexer selected for each query, as a mask added to the model's own."""

from typing import Any

import torch
from torch import Tensor


def selected(indices: Tensor | None, blocks: Tensor | None, module: Any, heads: int, keys: int) -> Tensor:
    """True where selected: keys, (batch, queries, selected), for all heads; or blocks of keys, for groups of heads."""
    if blocks is None:
        assert indices is not None
        return _marked(indices, keys).unsqueeze(1)
    size: int = module.indexer.block_size
    found = _marked(blocks, -(-keys // size)).repeat_interleave(size, dim=-1)[..., :keys]
    return found.repeat_interleave(heads // found.shape[1], dim=1)


def _marked(chosen: Tensor, count: int) -> Tensor:
    """One-hot of the chosen numbers; those outside [0, count) mark nothing."""
    chosen = chosen.long()
    chosen = chosen.where((chosen >= 0) & (chosen < count), count)
    found = torch.zeros((*chosen.shape[:-1], count + 1), dtype=torch.bool, device=chosen.device)
    return found.scatter_(-1, chosen, True)[..., :count]
