"""Prepared: a small forward call without its numbers: the core's struct, in which a call replaces a few words."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# Words of 64 bits, as core/flashtile.h has them.
THREADS, SEED, LENGTHS, Q, K, V, OUT, LSE = 1, 19, 22, 23, 28, 33, 38, 43
OTHERS = {"bias": 48, "mask": 53, "alibi": 58, "sink": 63}
MOST_ROWS = 1 << 14  # of a call that notices what Python does before it


class _Room(NamedTuple):
    """The memory of one call at a time."""

    words: Any
    lengths: Any


class Prepared:
    """Runs the call for other tensors that lie like those it was made for. Threads at once have a room each."""

    __slots__ = ("_check", "_forward", "_others", "_rooms", "_sequences", "_words", "others")

    def __init__(self, words: bytes, sequences: int, others: tuple[str, ...], forward: Any, check: Any) -> None:
        """others: by name, the arrays that come with q, k and v; besides, lengths of so many sequences, or 0."""
        self._words, self._forward, self._check = words, forward, check
        self._sequences = sequences
        self.others, self._others = others, [OTHERS[name] for name in others]
        self._rooms: list[_Room] = []

    def __call__(
        self,
        threads: int,
        seed: int,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int | None,
        others: Iterable[int] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        """By addresses, but for the lengths; an lse of None is not wanted."""
        try:
            room = self._rooms.pop()
        except IndexError:
            room = self._room()
        words = room.words
        words[THREADS], words[SEED] = threads, seed
        words[Q], words[K], words[V] = q, k, v
        words[OUT], words[LSE] = out, lse or 0
        for word, at in zip(self._others, others, strict=True):
            words[word] = at
        if lengths:
            room.lengths[:] = lengths
        self._check(self._forward(words))
        self._rooms.append(room)

    def _room(self) -> _Room:
        words = (ctypes.c_uint64 * (len(self._words) // 8)).from_buffer_copy(self._words)
        lengths = (ctypes.c_int64 * self._sequences)()
        if self._sequences:
            words[LENGTHS] = ctypes.addressof(lengths)
        return _Room(words, lengths)
