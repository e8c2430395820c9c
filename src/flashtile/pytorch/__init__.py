"""The only place that knows torch: operators, autograd, fake tensors, vmap, autocast."""

import torch

from flashtile.errors import UnsupportedError
from flashtile.host import machine

if _reason := machine.too_old("torch", torch.__version__):  # before the other modules, which take names it may lack
    raise UnsupportedError(_reason)

from flashtile.pytorch import vmap
from flashtile.pytorch.entry import attention
from flashtile.pytorch.merge import merge

__all__ = ["attention", "merge", "vmap"]
