"""Tickets: zeros in memory by which the programs of a launch count each other; it leaves them as zeros."""

from __future__ import annotations

from typing import Any

import torch

BANK = 1 << 16  # tickets for launches in graphs, made at a time
_of_stream: dict[tuple[int, int], Any] = {}
_banks: dict[int, list[Any]] = {}  # by device; graphs point into them, so none is ever given up
_taken: dict[int, int] = {}  # of the last bank


def tickets(count: int, device: Any) -> Any:
    """At least `count` of them: one set a stream, for its launches come one after the other.

    A launch in a graph has a set for itself, for the graph may run beside the stream that it was captured on. It comes
    from a bank that was cleared before: clearing it here would be one more node of the graph.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        return _of_bank(count, device)
    if _taken.get(index, BANK) > BANK // 2:
        _banks.setdefault(index, []).append(torch.zeros(BANK, dtype=torch.int32, device=device))
        _taken[index] = 0
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    found = _of_stream.get(key)
    if found is None or found.numel() < count:
        found = _of_stream[key] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
    return found


def _of_bank(count: int, device: Any) -> Any:
    at = _taken.get(device.index, BANK)
    if at + count > BANK:
        return torch.zeros(count, dtype=torch.int32, device=device)
    _taken[device.index] = at + -(-count // 4) * 4  # 16 bytes: Triton compiles another kernel for pointers between
    return _banks[device.index][-1][at : at + count]
