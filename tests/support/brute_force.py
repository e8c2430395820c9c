"""Attention by its definition, one score at a time in plain Python: checks the oracle on tiny sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import flashtile as ft


def philox(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers, from the paper of Salmon et al."""
    c, k = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0], c[1], c[2], c[3]


def kept(seed: int, head: int, i: int, j: int, dropout: float) -> bool:
    return philox(seed, (j // 4, i, head, 0))[j % 4] >= min(round(dropout * 2**32), 2**32 - 1)


def place(origin: ft.Origin | None, heads: int, b: int, h: int, i: int, j: int) -> tuple[int, int, int]:
    """The head among all sequences' heads, the query and the key, in the whole of which this call is a part."""
    o = origin or ft.Origin()
    heads = o.heads or heads
    return (o.sequence + b) * heads + o.head + h, o.query + i * o.query_step, o.key + j * o.key_step


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    band: ft.Band | None = None,
    spans: ft.Spans | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi: Any = None,
    softcap: float = 0.0,
    sink: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    origin: ft.Origin | None = None,
    kv_lengths: Any = None,
) -> tuple[Any, Any, Any]:
    """Return out, lse and the weights before dropout, for float64 arrays of rank 4."""
    B, H, n_q, dim = q.shape
    n_k, dim_v = v.shape[2:]
    scale = dim**-0.5 if scale is None else scale
    pairs = (B, H, n_q, n_k)
    mask = np.ones(pairs, bool) if mask is None else np.broadcast_to(mask, pairs)
    limits = None if spans is None else np.broadcast_to(spans.limits, (*pairs[:3], *spans.limits.shape[3:]))
    bias = np.zeros(pairs) if bias is None else np.broadcast_to(bias, pairs)
    alibi = np.zeros((B, H)) if alibi is None else np.broadcast_to(alibi, (B, H))
    out, lse, weights = np.zeros((B, H, n_q, dim_v)), np.full((B, H, n_q), -np.inf), np.zeros(pairs)
    for b, h, i in np.ndindex(B, H, n_q):
        group = H // k.shape[1]
        keys = n_k if kv_lengths is None else int(kv_lengths[b])
        at = i + (keys - n_q if band is None else band.offset)  # the key that query i is aligned with
        left, right = (band.left, band.right) if band else window or (None, None)
        scores = {}
        for j in range(keys):
            x = scale * math.fsum(float(a) * float(c) for a, c in zip(q[b, h, i], k[b, h // group, j], strict=True))
            if softcap:
                x = softcap * math.tanh(x / softcap)
            x += bias[b, h, i, j] - alibi[b, h] * abs(at - j)
            seen = (
                mask[b, h, i, j]
                and (limits is None or any(x <= j < y for x, y in limits[b, h, i]))
                and not (causal and j > at)
            )
            seen = seen and (left is None or j >= at - left) and (right is None or j <= at + right)
            if seen:
                scores[j] = x
        logits = [*scores.values(), *([] if sink is None else [float(sink[h])])]
        if not logits:
            continue
        top = max(logits)
        total = math.fsum(math.exp(x - top) for x in logits)
        lse[b, h, i] = top + math.log(total)
        for j, x in scores.items():
            weights[b, h, i, j] = P = math.exp(x - top) / total
            if dropout:
                P = P / (1 - dropout) if kept(seed, *place(origin, H, b, h, i, j), dropout) else 0.0
            out[b, h, i] += P * v[b, h // group, j]
    return out, lse, weights
