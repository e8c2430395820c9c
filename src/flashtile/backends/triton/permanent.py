"""Memory that is kept for good, and so must not come from the memory of a CUDA graph.

torch's allocator gives memory of a graph's pool to allocations on a stream that is being captured and, while
torch.compile warms a graph up or torch.cuda.use_mem_pool() is on, to all those of a thread. What is kept from there the
next graph overwrites. An allocation is neither where it is made by a thread of its own, on the default stream, which
cannot be captured.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Zeros for launches on all streams, now and later; None where this one is being captured, and so may not wait."""
    if device.type != "cuda":
        return _zeros(shape, dtype, device)
    if torch.cuda.is_current_stream_capturing():
        return None
    with ThreadPoolExecutor(1) as thread:  # of its own are also its modes and its current device
        return thread.submit(_complete, shape, dtype, device).result()


def _complete(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    with torch.cuda.device(device):
        made = _zeros(shape, dtype, device)
        torch.cuda.current_stream().synchronize()  # no other stream waits for this one
    return made


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Also for calls that come later: a tensor that was made in inference mode could not be cleared outside of it."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)
