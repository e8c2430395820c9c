"""Prepared: a small forward call without its numbers: the core's struct, in which a call replaces a few words."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from flashtile.dtypes import Array

# Words of 64 bits, as core/flashtile.h has them.
THREADS, SEED, Q, K, V, OUT, LSE = 1, 19, 23, 28, 33, 38, 43
MOST_ROWS = 1 << 14  # of a call that notices what Python does before it; and few enough to keep memory for an lse


class _Room(NamedTuple):
    """The memory of one call at a time. spare: for an lse that nobody wants."""

    words: Any
    spare: Array
    address: int


class Prepared:
    """Runs the call for other tensors that lie like those it was made for. Threads at once have a room each."""

    __slots__ = ("_check", "_forward", "_rooms", "_rows", "_words")

    def __init__(self, words: bytes, rows: int, forward: Any, check: Any) -> None:
        self._words, self._rows, self._forward, self._check = words, rows, forward, check
        self._rooms: list[_Room] = []

    def __call__(self, threads: int, seed: int, q: int, k: int, v: int, out: int, lse: int | None) -> None:
        """By addresses."""
        try:
            room = self._rooms.pop()
        except IndexError:
            room = self._room()
        words = room.words
        words[THREADS], words[SEED] = threads, seed
        words[Q], words[K], words[V] = q, k, v
        words[OUT], words[LSE] = out, room.address if lse is None else lse
        self._check(self._forward(words))
        self._rooms.append(room)

    def _room(self) -> _Room:
        words = (ctypes.c_uint64 * (len(self._words) // 8)).from_buffer_copy(self._words)
        spare = np.empty(self._rows, np.float64)  # room for float32 too
        return _Room(words, spare, spare.ctypes.data)
