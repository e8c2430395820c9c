"""WorkCounters: two zeros by which the programs of a launch take tasks and know who leaves last; it leaves them as zeros."""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import torch

from flashtile.backends.gpu import permanent

COUNT = 2
APART = 4  # 16 bytes: a LaunchSequence goes on with kernels that were compiled for pointers aligned so
BANK = 1 << 14  # pairs for launches in graphs, made at a time
MOST_FLAGS = 1 << 14  # beside the acquire_counters of a stream: those of a million rows
_of_stream: dict[tuple[int, int], list[WorkCounters]] = {}  # those that nobody has
_banks: dict[int, list[Any]] = {}  # by device; graphs point into them, so none is ever given up
_taken: dict[int, int] = {}  # pairs of the last bank
_clearing: dict[int, Any] = {}  # by device: an event, before which no graph may have pairs of the last bank
_lock = Lock()  # threads that capture graphs at once have a pair each


class WorkCounters(NamedTuple):
    """pair: the two zeros. flags: room for MOST_FLAGS flags, until the last launch of a call; None where there is none.

    Launches of a stream come one after the other, so what a call has given back the next one may have. Until then no
    one else has it: threads may launch on one stream at once, and then the flags of one call would be those of another.
    What a call that failed has not given back, nobody will have.
    """

    counters: Any
    flags: Any
    pool: list[WorkCounters] | None

    def release(self) -> None:
        """After the last launch that was given them."""
        if self.pool is not None:
            self.pool.append(self)


def acquire_counters(device: Any) -> WorkCounters:
    """For launches on the current stream of this device.

    A launch in a graph has a pair for itself, for the graph may run beside the stream that it was captured on. It comes
    from a bank that was cleared before: clearing it here would be one more node of the graph.
    """
    if device.type != "cuda":  # kernels are compiled without a GPU too
        return WorkCounters(_cleared_here(device), None, None)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        return WorkCounters(_of_a_graph(device), None, None)
    if _taken.get(index, BANK) > BANK // 2:
        with _lock:
            bank, _clearing[index] = permanent.zeros((BANK, APART), torch.int32, device)
            _banks.setdefault(index, []).append(bank)
            _taken[index] = 0
    elif _clearing and (event := _clearing.get(index)) is not None and event.query():
        _clearing.pop(index, None)
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    try:
        return _of_stream[key].pop()
    except (KeyError, IndexError):
        memory, _ = permanent.zeros((APART + MOST_FLAGS,), torch.int32, device)
        return WorkCounters(memory[:COUNT], memory[APART:], _of_stream.setdefault(key, []))


def _of_a_graph(device: Any) -> Any:
    index = device.index
    with _lock:
        taken = _taken.get(index, BANK)
        if taken == BANK or index in _clearing:  # whose event may not be asked for while a stream is captured
            return _cleared_here(device)
        _taken[index] = taken + 1
        return _banks[index][-1][taken, :COUNT]


def _cleared_here(device: Any) -> Any:
    """A pair for one launch, or for one graph, to which the clearing belongs."""
    return torch.zeros((COUNT,), dtype=torch.int32, device=device)
