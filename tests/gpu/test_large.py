"""Sizes beyond 16, 31 and 32 bits on a GPU, and a million tokens: samples of the results against float64."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from tests.gpu.child import python
from tests.gpu.oracle import sampled_keys, sampled_rows, standard
from tests.gpu.runner import each_backend

pytestmark = [pytest.mark.gpu, pytest.mark.slow, *each_backend]

GIB = 1 << 30


@pytest.fixture(autouse=True)
def room() -> None:
    """Free what earlier tests left in torch's allocator, and skip if the GPU has too little memory."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * GIB:
        pytest.skip("less than 60 GiB of the GPU are free")


def close(found: Tensor, wanted: Tensor, name: str) -> None:
    """Within a few units in the last place of the largest number of the sample."""
    bound = (2.0**-6 if found.dtype == torch.bfloat16 else 2.0**-20) * wanted.abs().max()
    error = (found.double() - wanted).abs().max()
    assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


def test_a_million_tokens() -> None:
    """N = 2^20, causal: out, lse and all gradients of rows and keys at the start, at the end and in between."""
    n = 1 << 20
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ft.attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v, out, lse = (x.detach() for x in (q, k, v, out, lse))
    early = torch.tensor([1, 2, 63, 64, 127, 128, 129, 1000], device="cuda")
    late = torch.tensor([n // 4, n // 2 - 1, n // 2, n - 129, n - 128, n - 65, n - 2, n - 1], device="cuda")
    for when, at in (("early", early), ("late", late)):
        wanted = sampled_rows(q, k, v, dout, at)
        for name, x, y in zip(("out", "lse", "dq"), (out, lse, dq), wanted, strict=True):
            close(x[at], y, f"{name}, {when}")
    # The last keys are seen by few queries: their gradients are as large as those of the last rows are small.
    for when, at in (("early", early), ("middle", late[:3]), ("late", late[3:])):
        for name, x, y in zip(("dk", "dv"), (dk, dv), sampled_keys(q, k, v, dout, out, lse, at), strict=True):
            close(x[at], y, f"{name}, {when}")


def test_more_than_two_to_the_31_numbers() -> None:
    """q, k, v of 2.7e9 elements each: addresses within a tensor need more than 31 bits, forward and backward."""
    heads, n, window = 40, 1 << 20, 100
    assert heads * n * 64 > 1 << 31
    torch.manual_seed(0)
    q = torch.randn(1, heads, n, 64, device="cuda", dtype=torch.bfloat16)
    q.requires_grad_()
    out, lse = ft.attention(q, q, q, window=(window, 0), return_lse=True)
    (grad,) = torch.autograd.grad(out, q, torch.ones_like(out))
    # The last head lies behind 2^31 elements; its last rows see the last window + 1 keys each.
    for h in (0, heads - 1):
        tail = q.detach()[:, h : h + 1, -3 * window :]
        near = tail.detach().clone().requires_grad_()
        alone, alone_lse = ft.attention(near, near, near, window=(window, 0), return_lse=True)
        last = slice(-window, None)
        close(out[:, h : h + 1, last], alone[:, :, last].double(), f"out of head {h}")
        close(lse[:, h : h + 1, last], alone_lse[:, :, last].double(), f"lse of head {h}")
        (wanted,) = torch.autograd.grad(alone, near, torch.ones_like(alone))
        close(grad[:, h : h + 1, last], wanted[:, :, last].double(), f"gradient of head {h}")


@pytest.mark.parametrize("shape", [(70_001, 1), (1, 70_001)], ids=["sequences", "heads"])
def test_more_than_65535(shape: tuple[int, int]) -> None:
    """A CUDA grid has at most 65535 programs along two of its axes."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(*shape, 5, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out, lse = ft.attention(q, k, v, causal=True, return_lse=True)
    want, want_lse = standard(q, k, v, causal=True)
    close(out, want.detach(), "out")
    close(lse, want_lse.detach(), "lse")
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(want, (q, k, v), dout.double())
    for name, x, y in zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
        close(x, y.double(), name)


def test_many_packed_sequences() -> None:
    """70,000 of them, of three rows at most, some of none."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 4, (70_000,))
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda()
    q, k, v = (torch.randn(int(cu[-1]), 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = ft.attention_packed(q, k, v, cu, cu, causal=True)
    starts = cu[:-1][lengths.cuda() > 0]
    assert torch.equal(out[starts], v[starts]), "the first row of a sequence sees one key"
    for s in (0, 1, 34_567, 69_998, 69_999):
        rows = slice(int(cu[s]), int(cu[s + 1]))
        want, _ = standard(*(x[rows].transpose(0, 1)[None] for x in (q, k, v)), causal=True)
        if lengths[s]:
            close(out[rows], want[0].transpose(0, 1), f"sequence {s}")


FAR_APART = """
import sys, torch, flashtile as ft
torch.manual_seed(0)
rows, step = 65, 1 << 26  # the last row of a tile lies 2^32 elements behind its first
room = torch.zeros(rows * step, device="cuda", dtype=torch.bfloat16)
near = torch.randn(1, 1, rows, 64, device="cuda", dtype=torch.bfloat16)
far = room.as_strided(near.shape, (rows * step, rows * step, step, 1))
far.copy_(near)
results = []
for x in (near, far):
    x = x.detach().requires_grad_()
    out = ft.attention(x, x, x, causal=True, backend=sys.argv[1])
    results.append((out, *torch.autograd.grad(out, x, torch.ones_like(out))))
print(max(float((a - b).abs().max()) for a, b in zip(*results)))
"""


def test_rows_far_apart(backend: str) -> None:
    """Large strides. In a separate process: a wrong address would end this one's work."""
    run = python("-c", FAR_APART, backend)
    assert run.returncode == 0, run.stderr[-3000:]
    assert float(run.stdout) < 0.05


def test_a_long_cache() -> None:
    """One query, 2^20 keys, split over the GPU; the oracle computes them in one piece."""
    torch.manual_seed(0)
    q = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 1 << 20, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = ft.attention(q, k, v, return_lse=True)
    S = (q[0, :, 0].double() @ k[0, 0].double().mT) / math.sqrt(128)
    close(out[0, :, 0], S.softmax(-1) @ v[0, 0].double(), "out")
    close(lse[0, :, 0], S.logsumexp(-1), "lse")
