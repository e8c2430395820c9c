"""Train a small transformer on a recall task, with any attention, and compare its losses with torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import flashtile as ft

LETTERS, LAG = 16, 5
GUESSING = math.log(LETTERS)  # the loss of guessing at random
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setup:
    """The model and its training. Attention is in bfloat16, everything else in float32."""

    device: str
    head_dim: int
    heads: int
    batch: int
    length: int
    steps: int = 300
    layers: int = 2
    rate: float = 1e-3

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


GPU_SETUPS = (Setup("cuda", 64, heads=4, batch=16, length=256), Setup("cuda", 128, heads=2, batch=16, length=256))


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, setup: Setup, attention: Attention) -> None:
        super().__init__()
        width = setup.width
        self.heads, self.attention = setup.heads, attention
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous().bfloat16()
            for y in self.qkv(self.norm_attention(x)).chunk(3, -1)
        )
        x = x + self.out(self.attention(q, k, v).float().transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Maps letters to logits of the next letter."""

    def __init__(self, setup: Setup, attention: Attention) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, setup.width)
        self.positions = nn.Embedding(setup.length, setup.width)
        self.blocks = nn.Sequential(*(Block(setup, attention) for _ in range(setup.layers)))
        self.head = nn.Sequential(nn.LayerNorm(setup.width), nn.Linear(setup.width, LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.letters(x) + self.positions.weight))
        return logits


def texts(setup: Setup, rng: torch.Generator) -> Tensor:
    """Seven of eight letters equal the letter LAG positions back: without attention they can only be guessed."""
    shape = (setup.batch, setup.length + 1)
    x, fresh = torch.randint(LETTERS, shape, generator=rng), torch.rand(shape, generator=rng) < 1 / 8
    for i in range(LAG, shape[1]):
        x[:, i] = torch.where(fresh[:, i], x[:, i], x[:, i - LAG])
    return x


def losses(setup: Setup, attention: Attention, nudge: bool = False, seed: int = 0) -> list[float]:
    """The loss of every step. The seed determines weights and texts; `nudge`: each weight starts one ulp higher."""
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(setup, attention)
    if nudge:
        with torch.no_grad():
            for w in model.parameters():
                w.copy_(torch.nextafter(w, torch.full_like(w, torch.inf)))
    model.to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), setup.rate)
    found = []
    for _ in range(setup.steps):
        x = texts(setup, rng).to(setup.device)
        loss = cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    curve: list[float] = torch.stack(found).tolist()
    return curve


def torch_attention(kernel: str) -> Attention:
    """torch's attention, by one of its kernels."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def flashtile_attention(backend: str = "auto", scale_factor: float = 1.0) -> Attention:
    """flashtile's attention, with the right scale times `scale_factor`."""
    return lambda q, k, v: ft.attention(q, k, v, causal=True, scale=scale_factor * q.shape[-1] ** -0.5, backend=backend)


@cache
def torch_runs(setup: Setup) -> dict[str, list[float]]:
    """Runs that differ in rounding only: torch's kernels, and MATH from weights one ulp away."""
    kernels = ("MATH", "FLASH_ATTENTION", *(["CUDNN_ATTENTION"] if setup.device == "cuda" else []))
    runs = {name: losses(setup, torch_attention(name)) for name in kernels}
    return runs | {"MATH, nudged": losses(setup, torch_attention("MATH"), nudge=True)}


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """The root mean square over the steps of the difference of two losses."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))


def check(setup: Setup, curve: Sequence[float]) -> None:
    """Check that a run has learned, as torch's runs do.

    Its average distance to torch's runs is at most twice the largest distance between two of them: a curve that differs
    in rounding only is about as far from them as they are from each other.
    """
    others = torch_runs(setup)
    assert all(np.mean(run[-10:]) < GUESSING / 2 for run in others.values()), "the training is too short"
    noise = max(distance(a, b) for a, b in combinations(others.values(), 2))
    away = float(np.mean([distance(curve, run) for run in others.values()]))
    assert away <= 2 * noise, f"{away:.2e} away from torch's runs, which are at most {noise:.2e} apart"
