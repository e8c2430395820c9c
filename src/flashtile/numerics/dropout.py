"""Dropout by Philox: keep(seed, head, i, j) has the same bits on every backend and for every tile size."""

from typing import Any

import numpy as np

from flashtile.numerics.dtypes import Array

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(seed: int, counter: tuple[Any, Any, Any, Any]) -> tuple[Array, Array, Array, Array]:
    """Philox4x32-10: map four counter words to four random words (each a uint64 that holds 32 bits)."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) & _LOW for c in counter))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> _32) ^ c1 ^ np.uint64(k0), b & _LOW, (a >> _32) ^ c3 ^ np.uint64(k1), a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def threshold(dropout: float) -> int:
    """The threshold: a weight is kept iff its 32 random bits are at least this."""
    return min(round(dropout * 2**32), 2**32 - 1)


def keep(seed: int, head: int, i: Any, j: Any, dropout: float) -> Array:
    """True where the weight of query i and key j survives; i and j are index arrays that broadcast.

    One Philox block serves four neighbouring keys: its counter is (j // 4, i, head, 0), and its word j % 4 is key j's.
    `head` counts query heads over the whole batch: sequence * heads + head. In a part of a whole all are those of the
    whole (origin.py).
    """
    i, j = np.broadcast_arrays(np.asarray(i, dtype=np.int64), np.asarray(j, dtype=np.int64))
    words = np.stack(philox(seed, (j // 4, i, head, 0)), axis=-1)
    chosen = np.take_along_axis(words, (j % 4)[..., None], axis=-1)[..., 0]
    kept: Array = chosen >= np.uint64(threshold(dropout))
    return kept
