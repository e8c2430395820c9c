"""Context parallelism: exact attention over sequences that are sharded over the ranks of torch.distributed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashtile.distributed.shards import Run, Shards

if TYPE_CHECKING:
    from flashtile.distributed.attention import attention
    from flashtile.distributed.decode import decode

__all__ = ["Run", "Shards", "attention", "decode"]


def __getattr__(name: str) -> Any:
    """The functions import torch when they are first used."""
    if name in ("attention", "decode"):
        globals()[name] = getattr(import_module(f"flashtile.distributed.{name}"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
