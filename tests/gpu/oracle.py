"""Standard attention in float64 torch, whole or for sampled rows, where the NumPy oracle would be too slow."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 16  # keys, or queries, at a time


def standard(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out and lse of (batch, heads, n, d); rows that see nothing give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    S = q.double() @ k.mT * q.shape[-1] ** -0.5
    if causal:
        n_q, n_k = S.shape[-2:]
        S = S.masked_fill(~torch.ones(n_q, n_k, dtype=torch.bool, device=S.device).tril(n_k - n_q), -torch.inf)
    L = S.logsumexp(-1)
    return (S - L[..., None]).exp().nan_to_num() @ v, L


def sampled_rows(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and dq of some queries of one head, (n, d), under a causal band of as many queries as keys."""
    scale, n = q.shape[-1] ** -0.5, k.shape[0]
    q, dout = q[rows].double(), dout[rows].double()
    L = torch.full(rows.shape, -torch.inf, dtype=torch.float64, device=q.device)
    for j in range(0, n, CHUNK):
        L = torch.logaddexp(L, _scores(q, k[j : j + CHUNK], rows, j, scale).logsumexp(-1))
    weights = [(_scores(q, k[j : j + CHUNK], rows, j, scale) - L[:, None]).exp() for j in range(0, n, CHUNK)]
    out = sum(P @ v[j : j + CHUNK].double() for P, j in zip(weights, range(0, n, CHUNK), strict=True))
    delta = (out * dout).sum(-1, keepdim=True)
    dq = torch.zeros_like(q)
    for P, j in zip(weights, range(0, n, CHUNK), strict=True):
        dS = P * (dout @ v[j : j + CHUNK].double().mT - delta)
        dq += scale * dS @ k[j : j + CHUNK].double()
    return out, L, dq


def sampled_keys(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """dk and dv of some keys of one head, from the out and lse of all rows, which a sample cannot provide."""
    scale, n = q.shape[-1] ** -0.5, q.shape[0]
    k, v = k[keys].double(), v[keys].double()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for i in range(0, n, CHUNK):
        rows = slice(i, i + CHUNK)
        b_q, b_do = q[rows].double(), dout[rows].double()
        seen = torch.arange(i, i + b_q.shape[0], device=q.device)[:, None] >= keys
        P = torch.where(seen, (b_q @ k.mT * scale - lse[rows, None].double()).exp(), 0.0)
        delta = (out[rows].double() * b_do).sum(-1, keepdim=True)
        dS = P * (b_do @ v.mT - delta)
        dk += scale * dS.mT @ b_q
        dv += P.mT @ b_do
    return dk, dv


def _scores(q: Tensor, k: Tensor, rows: Tensor, first: int, scale: float) -> Tensor:
    """[rows, keys] of a chunk that begins at key `first`."""
    at = torch.arange(first, first + k.shape[0], device=k.device)
    return (q @ k.double().mT * scale).masked_fill(at > rows[:, None], -torch.inf)
