"""Concurrent callers of the core, for ThreadSanitizer: python -m tests.backends.native.callers"""

from __future__ import annotations

import threading

import numpy as np

import flashtile as ft

ROUNDS = 60
SHAPES = ((40, 40, 16, 2, 2), (1, 700, 32, 8, 2), (3, 200, 16, 4, 1), (300, 300, 16, 2, 2), (20, 2100, 16, 1, 1))


def call(n: int) -> None:
    """Forward with and without an lse, and backward; every call twice, so that small ones are cached."""
    rng = np.random.default_rng(n)
    n_q, n_k, dim, heads, kv_heads = SHAPES[n % len(SHAPES)]
    q, k, v = (
        rng.standard_normal((2, h, m, dim), np.float32) for h, m in ((heads, n_q), (kv_heads, n_k), (kv_heads, n_k))
    )
    for threads in (1, 3):
        ft.attention(q, k, v, backend="native", threads=threads)
        ft.attention(q, k, v, causal=True, backend="native", threads=threads)
        out, lse = ft.attention(q, k, v, scale=30.0, return_lse=True, backend="native", threads=threads)
        ft.attention_backward(out, q, k, v, out, lse, scale=30.0, backend="native", threads=threads)


def main() -> None:
    def caller(first: int) -> None:
        for n in range(first, ROUNDS, 4):
            call(n)

    callers = [threading.Thread(target=caller, args=(first,)) for first in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    print(ROUNDS * 8, "calls")


if __name__ == "__main__":
    main()
