"""Tickets: two zeros by which the programs of a launch take tasks and know who leaves last; it leaves them as zeros."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch

COUNT = 2
APART = 4  # 16 bytes: a Series goes on with kernels that were compiled for pointers aligned so
BANK = 1 << 14  # pairs for launches in graphs, made at a time
_of_stream: dict[tuple[int, int], Any] = {}
_banks: dict[int, list[Any]] = {}  # by device; graphs point into them, so none is ever given up
_taken: dict[int, int] = {}  # pairs of the last bank
_lock = Lock()  # threads that capture graphs at once have a pair each


def tickets(device: Any) -> Any:
    """One pair a stream, for its launches come one after the other.

    A launch in a graph has a pair for itself, for the graph may run beside the stream that it was captured on. It comes
    from a bank that was cleared before: clearing it here would be one more node of the graph.
    """
    if device.type != "cuda":  # kernels are compiled without a GPU too
        return torch.zeros(COUNT, dtype=torch.int32, device=device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        return _of_a_graph(device)
    if _taken.get(index, BANK) > BANK // 2:
        with _lock:
            _banks.setdefault(index, []).append(torch.zeros((BANK, APART), dtype=torch.int32, device=device))
            _taken[index] = 0
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    found = _of_stream.get(key)
    if found is None:
        found = _of_stream[key] = torch.zeros(COUNT, dtype=torch.int32, device=device)
    return found


def _of_a_graph(device: Any) -> Any:
    index = device.index
    with _lock:
        taken = _taken.get(index, BANK)
        if taken == BANK:
            return torch.zeros(COUNT, dtype=torch.int32, device=device)
        _taken[index] = taken + 1
        return _banks[index][-1][taken, :COUNT]
