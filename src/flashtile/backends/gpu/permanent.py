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


def zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> tuple[Any, Any]:
    """Zeros for the launches that follow on this stream, and, once the event beside them is over, for those on others.

    Not while this stream is being captured. Nobody waits on the host: what follows on this stream waits on the GPU.
    """
    if device.type != "cuda":
        return _zeros(shape, dtype, device), None
    with ThreadPoolExecutor(1) as thread:  # of its own are also its modes and its current device
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
    """Also for calls that come later: a tensor that was made in inference mode could not be cleared outside of it."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)
