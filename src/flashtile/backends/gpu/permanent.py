"""Memory that is kept for the life of the process, and so must not come from a CUDA graph's memory pool.

torch's allocator serves allocations on a captured stream from the graph's pool and, while torch.compile warms up a
graph or torch.cuda.use_mem_pool() is active, all allocations of that thread. The next graph overwrites such memory. A
thread of its own, on the default stream, which cannot be captured, allocates from neither.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> tuple[Any, Any]:
    """Return zeros for later launches on this stream, and an event after which other streams may use them too.

    This stream must not be under capture. The host does not wait; later work on this stream waits on the GPU.
    """
    if device.type != "cuda":
        return _zeros(shape, dtype, device), None
    with ThreadPoolExecutor(1) as thread:  # has its own modes and its own current device too
        made, cleared = thread.submit(_cleared, shape, dtype, device).result()
    torch.cuda.current_stream(device).wait_event(cleared)
    return made, cleared


def _cleared(shape: tuple[int, ...], dtype: Any, device: Any) -> tuple[Any, Any]:
    with torch.cuda.device(device):
        made = _zeros(shape, dtype, device)
        cleared = torch.cuda.Event()  # type: ignore[no-untyped-call]
        cleared.record()
    return made, cleared


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Disable inference mode: a tensor made in it could not be cleared outside of it by a later call."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)
