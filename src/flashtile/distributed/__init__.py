"""Context parallelism: exact attention over sequences that are sharded over the ranks of torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashtile.distributed.shards import Run, Shards

if TYPE_CHECKING:
    from flashtile.distributed.attention import attention

__all__ = ["Run", "Shards", "attention"]


def __getattr__(name: str) -> Any:
    """attention() imports torch when it is first used."""
    if name == "attention":
        from flashtile.distributed.attention import attention

        globals()["attention"] = attention
        return attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
