"""Tiled attention and standard attention: the same result, but tiling never makes the N x N matrix.

standard() is the formula taken literally. tiled() processes the same scores in tiles of block x block, with the three
running statistics of the online softmax (see online_softmax.py): m, l and O for a block of rows. That is all of flash
attention; the kernels of this package add speed and options.
"""

import math
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import flashtile
from flashtile.lab.bench.suite import time_all
from flashtile.lab.bench.workload import OURS
from flashtile.lab.lessons.text import Say
from flashtile.lab.units import size
from flashtile.numerics.dtypes import Array

BLOCK, DIM = 128, 64


def standard(Q: Array, K: Array, V: Array, causal: bool = False) -> Array:
    """Standard attention: three steps, with two N x N matrices in between."""
    S = Q @ K.T * Q.shape[1] ** -0.5  # [n, n]
    if causal:
        S[np.tril(np.ones_like(S)) == 0] = -math.inf  # later keys are hidden
    P = np.exp(S - S.max(axis=1, keepdims=True))  # [n, n]
    P /= P.sum(axis=1, keepdims=True)
    O: Array = P @ V
    return O


def tiled(Q: Any, K: Any, V: Any, block: int = BLOCK, causal: bool = False, xp: Any = np) -> Any:
    """The same, one tile at a time. xp is numpy or torch: the loop works with either."""
    n, d = Q.shape
    out = xp.zeros_like(Q)
    for i in range(0, n, block):
        Qi = Q[i : i + block]  # [br, d]
        m = xp.full_like(Qi[:, :1], -math.inf)  # [br, 1]  running maximum
        l = xp.zeros_like(Qi[:, :1])  # [br, 1]  running sum
        O = xp.zeros_like(Qi)  # [br, d]  running output, not yet divided
        for j in range(0, min(i + block, n) if causal else n, block):  # tiles above the diagonal are skipped
            S = Qi @ K[j : j + block].T * d**-0.5  # [br, bc]
            if causal and j + block > i + 1:  # on the diagonal: a partial tile
                S[xp.tril(xp.ones_like(S), i - j) == 0] = -math.inf
            m_new = xp.maximum(m, xp.amax(S, axis=1, keepdims=True))
            P = xp.exp(S - m_new)
            factor = xp.exp(m - m_new)
            l = l * factor + xp.sum(P, axis=1, keepdims=True)
            O = O * factor + P @ V[j : j + block]
            m = m_new
        out[i : i + block] = O / l  # the only division, the only write
    return out


def peak(call: Callable[[], Any]) -> int:
    """The peak bytes that NumPy allocated during the call."""
    tracemalloc.start()
    try:
        result = call()
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del result
    return held


def run(say: Say, quick: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(42)

    def inputs(n: int, dtype: type = np.float32) -> list[Array]:
        return [rng.standard_normal((n, DIM)).astype(dtype) for _ in range(3)]

    say.heading("The same result")
    errors: list[dict[str, Any]] = []
    for n, block, causal in ((256, 64, False), (256, 64, True), (301, 64, False), (301, 64, True), (301, 7, True)):
        Q, K, V = inputs(n, np.float64)
        ours, whole = tiled(Q, K, V, block, causal), standard(Q, K, V, causal)
        oracle = flashtile.standard_attention(Q, K, V, causal=causal)
        errors.append(
            {
                "n": n,
                "block": block,
                "causal": causal,
                "against_standard": float(np.abs(ours - whole).max()),
                "against_oracle": float(np.abs(ours - oracle).max()),
            }
        )
    say.table(
        ("N", "block", "mask", "from standard()", "from the oracle"),
        [
            (
                str(row["n"]),
                str(row["block"]),
                "causal" if row["causal"] else "none",
                f"{row['against_standard']:.1e}",
                f"{row['against_oracle']:.1e}",
            )
            for row in errors
        ],
    )
    say.paragraph(
        "Largest differences in float64. N need not be a multiple of the block. The differences come from the order of",
        "the sums: the method approximates nothing.",
    )

    say.heading("Memory")
    lengths = (256, 512, 1024) if quick else (512, 1024, 2048)
    memory = []
    for n in lengths:
        Q, K, V = inputs(n)
        held = {way.__name__: peak(partial(way, Q, K, V)) for way in (standard, tiled)}
        memory.append({"n": n, "matrix": 4 * n * n, **held, "output": 4 * n * DIM})
    say.table(
        ("N", "one N x N matrix", "standard()", "tiled()", "of which output"),
        [(str(n), *map(size, others)) for n, *others in (row.values() for row in memory)],
    )
    first, last = memory[0], memory[-1]
    grown = last["n"] // first["n"]
    say.paragraph(
        f"Peak memory in float32, measured. With {grown} times the length, standard() holds "
        f"{last['standard'] / first['standard']:.0f} times as much, tiled() {last['tiled'] / first['tiled']:.1f} "
        f"times. At 128K tokens one matrix in float32 is 128K x 128K x 4 bytes = {size(4 * (128 << 10) ** 2)}, "
        f"for every head of every layer; the tile stays {size(4 * BLOCK * BLOCK)}.",
    )

    say.heading("Time")
    n = 512 if quick else 1024
    Q, K, V = inputs(n)
    contenders = {
        OURS: lambda: flashtile.attention(Q, K, V),
        f"{OURS}, causal": lambda: flashtile.attention(Q, K, V, causal=True),
        "standard(), NumPy": lambda: standard(Q, K, V),
        "tiled(), NumPy": lambda: tiled(Q, K, V),
        "tiled(), causal": lambda: tiled(Q, K, V, causal=True),
    }
    times = say.timings(f"N = {n}, D = {DIM}, float32", time_all(contenders, 0.2 if quick else 1))
    say.paragraph(
        "With a causal mask, about half of the tiles are skipped. flashtile runs the same loop in one call; the lesson",
        "launches shows why that matters.",
    )
    worst = max(max(row["against_standard"], row["against_oracle"]) for row in errors)
    return {"errors": errors, "memory": memory, "times": times, "holds": worst < 1e-10}
