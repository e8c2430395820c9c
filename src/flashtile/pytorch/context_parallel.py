"""attention() inside torch's context_parallel(), which shards sequences: answered by flashtile.distributed."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from flashtile.errors import UnsupportedError
from flashtile.pytorch.interception import CONTEXT_PARALLEL
from flashtile.spans import Spans


def attention(
    mesh: Any, q: Tensor, k: Tensor, v: Tensor, backend: str, return_lse: bool, options: dict[str, Any]
) -> Any:
    """Run a call of parts of sequences, in the order in which torch shards its buffers."""
    from flashtile import distributed

    if options.get("cu_q") is not None:
        raise UnsupportedError(
            "cu_q: expected None inside torch's context_parallel(), which does not shard packed sequences; "
            "flashtile.distributed.attention() does"
        )
    if "spans" in options:
        options["spans"] = Spans.of(options["spans"])
    order = distributed.Shards.zigzag if _is_balanced() else distributed.Shards.contiguous
    shards = order(q.shape[-2] * mesh.size(), ranks=mesh.size())
    return distributed.attention(q, k, v, group=mesh, shards=shards, backend=backend, return_lse=return_lse, **options)


def _is_balanced() -> bool:
    """Whether each rank has a part from the front and one from the back, as is the default."""
    module = next(sys.modules[name] for name in reversed(CONTEXT_PARALLEL) if name in sys.modules)
    return bool(module._cp_options.enable_load_balance)
