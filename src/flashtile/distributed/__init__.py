"""Context parallelism: exact attention over sequences that are sharded over the ranks of torch.distributed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashtile.distributed.shards import Run, Shards

if TYPE_CHECKING:
    from flashtile.distributed.context_parallel import attention
    from flashtile.distributed.decoding import decode

__all__ = ["Run", "Shards", "attention", "decode"]
_MODULES = {"attention": "context_parallel", "decode": "decoding"}  # they import torch


def __getattr__(name: str) -> Any:
    """Import functions of tensors when they are first used."""
    if name in _MODULES:
        found = getattr(import_module(f"flashtile.distributed.{_MODULES[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
