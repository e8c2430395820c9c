"""Work counters: programs take tasks from one and count exits in the other; the last one resets both to 0."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import torch

from flashtile.backends.gpu import permanent

COUNT = 2
STRIDE = 4  # 16 bytes: a LaunchSequence keeps using kernels that were compiled for pointers with this alignment
BANK = 1 << 14  # pairs of counters for launches in graphs, allocated together
MAX_FLAGS = 1 << 14  # beside the counters of a stream: enough for a million rows
_free: dict[tuple[int, int], list[WorkCounters]] = {}  # that are not in use
_banks: dict[int, list[Any]] = {}  # by device; graphs keep pointers to them, so none is ever freed
_taken: dict[int, int] = {}  # number of pairs of the last bank
_clearing: dict[int, Any] = {}  # by device: an event, before which no graph may use the last bank
_lock = Lock()  # threads that capture graphs at once get a pair each


class WorkCounters(NamedTuple):
    """counters: the two zeros. flags: memory for MAX_FLAGS nonfinite flags during one call, or None.

    Launches of a stream run one after the other, so the next call may use what a call has released. Until then it is
    not shared: threads may launch on one stream at once, and would overwrite each other's flags. A call that fails does
    not release its counters, and they are not used again.
    """

    counters: Any
    flags: Any
    pool: list[WorkCounters] | None

    def release(self) -> None:
        """Return them to their pool, after the last launch that uses them."""
        if self.pool is not None:
            self.pool.append(self)


def acquire_counters(device: Any) -> WorkCounters:
    """Get work counters for launches on the current stream of this device.

    A launch in a graph gets a pair of its own, because the graph may run beside the stream that it was captured on. The
    pair comes from a bank that was cleared before: clearing it here would add a node to the graph.
    """
    if device.type != "cuda":  # kernels are compiled without a GPU too
        return WorkCounters(_cleared_here(device), None, None)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        return WorkCounters(_from_bank(device), None, None)
    if _taken.get(index, BANK) > BANK // 2:
        with _lock:
            bank, _clearing[index] = permanent.zeros((BANK, STRIDE), torch.int32, device)
            _banks.setdefault(index, []).append(bank)
            _taken[index] = 0
    elif _clearing and (event := _clearing.get(index)) is not None and event.query():
        _clearing.pop(index, None)
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    try:
        return _free[key].pop()
    except (KeyError, IndexError):
        memory, _ = permanent.zeros((STRIDE + MAX_FLAGS,), torch.int32, device)
        return WorkCounters(memory[:COUNT], memory[STRIDE:], _free.setdefault(key, []))


def _from_bank(device: Any) -> Any:
    index = device.index
    with _lock:
        taken = _taken.get(index, BANK)
        if taken == BANK or index in _clearing:  # an event must not be queried during capture
            return _cleared_here(device)
        _taken[index] = taken + 1
        return _banks[index][-1][taken, :COUNT]


def _cleared_here(device: Any) -> Any:
    """A pair for one launch, or for one graph that contains its clearing."""
    return torch.zeros((COUNT,), dtype=torch.int32, device=device)
