"""Random problems: sizes, layouts, dtypes, magnitudes and combinations of options, each from one seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flashtile as ft

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class RandomProblem:
    """Rank-4 tensors, and options of attention() as tensors and numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        def short(x: Any) -> Any:
            return f"{tuple(x.shape)}/{x.stride()}" if isinstance(x, Tensor) else x

        given = {name: short(x) for name, x in self.options.items()}
        return f"q {short(self.q)} k {short(self.k)} v {short(self.v)} {self.q.dtype} {given}"


def problem(seed: int) -> RandomProblem:
    rng = np.random.default_rng(seed)
    dtype = DTYPES[rng.choice(4, p=[0.2, 0.4, 0.25, 0.15])]
    real = torch.float64 if dtype is torch.float64 else torch.float32
    batch, kv_heads, group = int(rng.choice([1, 1, 2, 3])), int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3, 8]))
    heads = kv_heads * group
    n_q = int(rng.choice([0, 1, 1, 2, 3, 5, 8, 17, 33, 48, 49, 65, 100, 150]))
    n_k = int(rng.choice([0, 1, 2, 7, 24, 64, 65, 97, 150, 193, 260, 700]))
    dim, dim_v = (int(rng.choice([1, 2, 7, 8, 16, 17, 32, 33, 64, 80, 129])) for _ in range(2))
    if rng.random() < 0.5:
        dim_v = dim

    def some(x: float) -> bool:
        return bool(rng.random() < x)

    def numbers(*shape: int, kind: torch.dtype = dtype, size: float = 1.0) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * size).to(kind)

    size = float(rng.choice([1, 1, 1, 0.01, 5, 30]))
    q = with_layout(numbers(batch, heads, n_q, dim, size=size), rng)
    k = with_layout(numbers(batch, kv_heads, n_k, dim), rng)
    v = with_layout(numbers(batch, kv_heads, n_k, dim_v), rng)
    dout, dlse = with_layout(numbers(batch, heads, n_q, dim_v), rng), numbers(batch, heads, n_q, kind=real)
    options: dict[str, Any] = {}
    match rng.choice(["", "", "causal", "causal", "window", "both", "band"]):
        case "causal":
            options["causal"] = True
        case "window" | "both" as name:
            ends = (None if some(0.3) else int(rng.integers(0, 90)) for _ in range(2))
            options |= {"window": tuple(ends)} | ({"causal": True} if name == "both" else {})
        case "band":
            options["band"] = ft.Band(*(int(x) for x in rng.integers(-20, 120, 2)), int(rng.integers(-60, 120)))
    axes = [n if some(0.6) else 1 for n in (batch, heads, n_q, n_k)]
    if some(0.25):
        options["mask"] = with_layout(torch.from_numpy(rng.random(axes) < rng.choice([0.1, 0.5, 0.95])), rng)
    if some(0.25):
        bias = numbers(*axes, kind=dtype if some(0.5) else real)
        if some(0.3):  # as additive masks do
            hidden = torch.from_numpy(rng.random(axes[2]) < 0.3)
            bias[:, :, hidden] = float(rng.choice([-1e4, -30000.0, torch.finfo(bias.dtype).min]))
        options["bias"] = with_layout(bias, rng)
    if some(0.15):
        options["alibi"] = numbers(*([heads] if some(0.5) else [batch, heads]), kind=real).abs()
    if some(0.15):
        options["softcap"] = float(rng.choice([0.5, 5, 50]))
    if some(0.2):
        options["sink"] = numbers(heads, kind=real if some(0.5) else dtype)
    if some(0.25):
        options["scale"] = float(rng.choice([0.0, 1.0, -0.3, 0.02]))
    if some(0.15):
        options |= {"dropout": float(rng.choice([0.1, 0.5, 0.9])), "seed": int(rng.integers(0, 1 << 63))}
        if some(0.4):
            query, key, head, sequence = (int(x) for x in rng.integers(0, (1000, 1000, 5, 5)))
            steps = (int(x) for x in rng.integers(1, 6, 2))
            options["origin"] = ft.Origin(query, key, head, sequence, heads + head + int(rng.integers(3)), *steps)
    if some(0.25):
        kind = torch.int32 if some(0.5) else torch.int64
        options["kv_lengths"] = torch.from_numpy(rng.integers(0, n_k + 1, batch)).to(kind)
    if some(0.2):
        count, rows = int(rng.integers(1, 9)), [n if some(0.6) else 1 for n in (batch, heads, n_q)]
        ends = np.sort(rng.integers(0, n_k + 4, (*rows, 2 * count)), -1)
        if some(0.5) and rows[2] > 1:  # neighbours alike, as in documents
            ends = ends[:, :, np.arange(n_q) // 20 * 20]
        options["spans"] = ft.Spans(*torch.from_numpy(ends).unflatten(-1, (count, 2)).unbind(-1))
    return RandomProblem(q, k, v, dout, dlse, options)


def with_layout(x: Tensor, rng: Any) -> Tensor:
    """The same numbers, in another memory layout: other orders of axes, gaps, odd addresses."""
    match rng.choice(["plain", "plain", "rows first", "gaps", "columns apart", "off by one", "expanded"]):
        case "rows first" if x.ndim == 4:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "gaps":
            room = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
            room[..., : x.shape[-1]] = x
            return room[..., : x.shape[-1]]
        case "columns apart":
            return torch.stack((x, x), -1)[..., 0]
        case "off by one":
            return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
        case "expanded" if x.ndim == 4 and x.shape[0] > 1:
            return x[:1].expand(x.shape)
    return x
