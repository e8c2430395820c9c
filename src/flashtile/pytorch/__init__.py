"""The only place that knows torch: operators, autograd, fake tensors, vmap, autocast."""

from flashtile.pytorch import vmap
from flashtile.pytorch.front import attention
from flashtile.pytorch.merge import merge

__all__ = ["attention", "merge", "vmap"]
