"""Support for torch tensors: operators, autograd, fake tensors, vmap, autocast."""

import torch

from flashtile.errors import UnsupportedError
from flashtile.host import machine

if _reason := machine.too_old("torch", torch.__version__):  # before imports that fail with an old torch
    raise UnsupportedError(_reason)

from flashtile.pytorch import vmap
from flashtile.pytorch.entry import attention
from flashtile.pytorch.merge import merge

__all__ = ["attention", "merge", "vmap"]
