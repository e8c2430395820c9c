"""Context parallelism: exact attention over sequences that are sharded over the ranks of torch.distributed."""

from flashtile.distributed.shards import Run, Shards

__all__ = ["Run", "Shards"]
