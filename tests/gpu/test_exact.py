"""Small integers on a GPU: every sum and product is exact, so the result is too, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from tests.gpu.runner import each_backend

pytestmark = [pytest.mark.gpu, *each_backend]

HALVES = [torch.bfloat16, torch.float16]


def whole(low: int, high: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Integers from low to high."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("n_k", [1, 2, 64, 128, 1024])
def test_equal_scores_give_the_mean(n_k: int, dtype: torch.dtype) -> None:
    """q is 0, so each of 2^n keys weighs 2^-n: a mean of integers, rounded once. (So many heads: no keys are split.)"""
    q = torch.zeros(16, 8, 65, 64, device="cuda", dtype=dtype)
    k, v = whole(-4, 4, 16, 4, n_k, 64, dtype=dtype), whole(-8, 8, 16, 4, n_k, 64, dtype=dtype, seed=1)
    out, lse = ft.attention(q, k, v, return_lse=True)
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(out.shape)
    assert torch.equal(out, mean.to(dtype))
    if n_k == 1:
        assert not lse.any()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_causal_means(dtype: torch.dtype) -> None:
    """A row that sees 2^m keys is their mean, an exact number."""
    q = torch.zeros(1, 2, 300, 64, device="cuda", dtype=dtype)
    v = whole(-8, 8, 1, 2, 300, 64, dtype=dtype)
    out = ft.attention(q, q, v, causal=True)
    sums = v.double().cumsum(2)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        assert torch.equal(out[:, :, rows - 1], (sums[:, :, rows - 1] / rows).to(dtype)), rows


def permutation(n_q: int, n_k: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """q, k, and for each query the one key with a weight: all others weigh exactly 0."""
    codes = 2 * whole(0, 1, n_k, 64, dtype=torch.float64) - 1
    wanted = torch.randperm(max(n_q, n_k), generator=torch.Generator().manual_seed(2))[:n_q].cuda() % n_k
    q, k = 8 * codes[wanted], codes
    scores = q @ k.mT
    best = scores.gather(1, wanted[:, None])
    assert (scores.scatter(1, wanted[:, None], -torch.inf).amax(1, keepdim=True) < best - 120).all()
    return q.to(dtype)[None, None], k.to(dtype)[None, None], wanted


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("lengths", [(65, 129), (129, 65), (1, 701), (300, 300)], ids=str)
def test_attention_as_a_look_up(lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """Weights are 1 and 0: out is v by index, dv sums dout by index, and the gradients of q and k are 0."""
    q, k, wanted = permutation(*lengths, dtype)
    n_q, n_k = lengths
    v, dout = whole(-8, 8, 1, 1, n_k, 64, dtype=dtype), whole(-8, 8, 1, 1, n_q, 64, dtype=dtype, seed=1)
    for x in (q, k, v):
        x.requires_grad_()
    out = ft.attention(q, k, v, scale=1.0)
    assert torch.equal(out, v[:, :, wanted])
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert torch.equal(dv, torch.zeros_like(v).index_add(2, wanted, dout))
    assert not dq.any() and not dk.any()


@pytest.mark.parametrize("dtype", HALVES)
def test_two_keys_alike_share(dtype: torch.dtype) -> None:
    """Each key twice: the mean of two values, and half of dout for each."""
    q, k, wanted = permutation(65, 64, dtype)
    k = torch.cat([k, k], 2)
    v, dout = whole(-8, 8, 1, 1, 128, 64, dtype=dtype), 2 * whole(-4, 4, 1, 1, 65, 64, dtype=dtype, seed=1)
    v.requires_grad_()
    out = ft.attention(q, k, v, scale=1.0)
    assert torch.equal(out, (v[:, :, wanted] + v[:, :, wanted + 64]) / 2)
    (dv,) = torch.autograd.grad(out, v, dout)
    half = torch.zeros(1, 1, 64, 64, device="cuda", dtype=dtype).index_add(2, wanted, dout / 2)
    assert torch.equal(dv, torch.cat([half, half], 2))


def test_a_sink_takes_its_share() -> None:
    """A sink of 0 next to 2^n - 1 scores of 0 acts as one more key with value 0."""
    q = torch.zeros(1, 2, 65, 64, device="cuda", dtype=torch.bfloat16)
    v = whole(-8, 8, 1, 2, 127, 64, dtype=torch.bfloat16)
    out = ft.attention(q, torch.zeros_like(v), v, sink=torch.zeros(2, device="cuda"))
    assert torch.equal(out, (v.double().sum(2, keepdim=True) / 128).bfloat16().expand(out.shape))
