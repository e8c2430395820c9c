"""Attention in plain torch operations, written from the documentation alone; gradients by autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import flashtile as ft
from flashtile.numerics import dropout as bits


def attention(q: Tensor, k: Tensor, v: Tensor, kind: torch.dtype = torch.float64, **o: Any) -> tuple[Tensor, Tensor]:
    """Output and lse of rank-4 tensors, computed in this dtype."""
    q, k, v = (x.to(kind) for x in (q, k, v))
    batch, heads, n_q, dim = q.shape
    n_k, group = k.shape[2], heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = o.get("scale")
    S = (q @ k.mT) * (dim**-0.5 if scale is None else scale)
    if o.get("softcap"):
        S = o["softcap"] * torch.tanh(S / o["softcap"])
    if o.get("bias") is not None:
        S = S + o["bias"].to(kind)
    lengths = o.get("kv_lengths")
    lengths = torch.full((batch,), n_k) if lengths is None else lengths.long()
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)
    band = o.get("band")
    at = i + (lengths[:, None, None, None] - n_q if band is None else band.offset)
    if o.get("alibi") is not None:
        slopes = o["alibi"].to(kind).reshape(-1, heads, 1, 1)
        S = S - slopes * (at - j).abs().to(kind)
    seen = (j < lengths[:, None, None, None]) & torch.ones(batch, heads, n_q, n_k, dtype=torch.bool)
    left, right = (band.left, band.right) if band is not None else (o.get("window") or (None, None))
    if o.get("causal"):
        seen = seen & (j <= at)
    if left is not None:
        seen = seen & (j >= at - left)
    if right is not None:
        seen = seen & (j <= at + right)
    if o.get("spans") is not None:
        begin, end = (x.unsqueeze(-2) for x in (o["spans"].begin, o["spans"].end))
        seen = seen & ((begin <= j[:, None]) & (j[:, None] < end)).any(-1)
    if o.get("mask") is not None:
        seen = seen & o["mask"]
    S = S.masked_fill(~seen, -torch.inf)
    logits = S
    if o.get("sink") is not None:
        logits = torch.cat((S, o["sink"].to(kind).reshape(1, heads, 1, 1).expand(batch, heads, n_q, 1)), -1)
    top = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    top = top.detach().masked_fill(top == -torch.inf, 0)
    P, total = (S - top).exp(), (logits - top).exp().sum(-1, keepdim=True)
    empty = total == 0
    P = P / total.masked_fill(empty, 1)
    if o.get("dropout"):
        kept = _kept((batch, heads, n_q, n_k), o["seed"], o["dropout"], o.get("origin"))
        P = P * torch.from_numpy(kept) / (1 - o["dropout"])
    lse = top + total.masked_fill(empty, 1).log()
    return P @ v, lse.masked_fill(empty, -torch.inf)[..., 0]


def _kept(pairs: tuple[int, ...], seed: int, probability: float, origin: ft.Origin | None) -> Any:
    batch, heads, n_q, n_k = pairs
    o = origin or ft.Origin()
    i, j = (np.arange(n_q) * o.query_step + o.query)[:, None], np.arange(n_k) * o.key_step + o.key
    each = [
        bits.keep(seed, (o.sequence + s) * (o.heads or heads) + o.head + h, i, j, probability)
        for s in range(batch)
        for h in range(heads)
    ]
    return np.stack(each).reshape(pairs) if each else np.ones(pairs, bool)
