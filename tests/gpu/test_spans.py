"""Spans on a GPU: against packed sequences and the oracle, in long sequences too, and limits that point anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from tests.backends.triton.test_spans import call_with
from tests.gpu.placement import FENCE, same_bits
from tests.gpu.runner import Given, check, each_backend, refusal
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.support.grid import Case, Size, build, truth_of

pytestmark = [pytest.mark.gpu, *each_backend]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [LONG, PACKED, Size(1, 4, 1, 300, 500, 128, 128)], ids=str)
def test_spans_that_neighbours_share(size: Size, count: int) -> None:
    """Some tiles are full, and rows of tiles that see the same keys are no neighbours."""
    call = call_with(size, "bfloat16", count, heads=size.heads if count == 2 else 1)
    if reason := refusal(call):
        pytest.skip(reason)
    check(call, truth_of(call))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [5000, 70_001], ids=["two chunks of visits", "a wide search"])
def test_documents_are_packed_sequences(n: int, causal: bool) -> None:
    rng = np.random.default_rng(0)
    lengths = [int(x) for x in rng.integers(1, 900, n)]
    ends = np.minimum(np.cumsum(lengths), n)
    ends = ends[: int(np.searchsorted(ends, n)) + 1]
    torch.manual_seed(0)
    x = [torch.randn(1, heads, n, 64, device="cuda", dtype=torch.bfloat16) for heads in (2, 1, 1, 2)]
    q, k, v = (y.requires_grad_() for y in x[:3])
    of = torch.as_tensor(np.searchsorted(ends, np.arange(n), side="right"), device="cuda")
    found = _step(ft.attention, (q, k, v), x[3], spans=ft.masks.documents(of), causal=causal)
    starts = torch.as_tensor(np.append(0, ends), device="cuda", dtype=torch.int32)
    rows = [y.detach()[0].transpose(0, 1).contiguous().requires_grad_() for y in (q, k, v)]
    dout = x[3][0].transpose(0, 1)
    wanted = _step(ft.attention_packed, rows, dout, cu_q=starts, cu_k=starts, causal=causal)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[0].transpose(0, 1), other, rtol=2e-2, atol=2e-2)


def _step(function: Any, inputs: Any, dout: Tensor, **options: Any) -> list[Tensor]:
    """The output and the gradients of a call."""
    out = function(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("size", [LONG, RAGGED, DECODE, PACKED], ids=str)
def test_limits_beyond_the_keys_are_clipped(size: Size) -> None:
    """Ends of 2^31-1 give the bits of ends at the last key; what lies beyond is NaN."""
    call = build(Case(size, "bfloat16", ("spans",)))
    limits = call.options["spans"].limits
    results = []
    for far in (size.n_k, 2**31 - 1):
        clipped = ft.Spans.of(np.where(limits >= size.n_k - 100, far, limits).astype(np.int32))
        given = Given(replace(call, options={"spans": clipped}), "cuda", FENCE)
        if reason := given.refusal("cuda"):
            pytest.skip(reason)
        results.append(given.step())
        given.check_untouched()
    assert all(same_bits(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("size", [LONG, RAGGED, DECODE, PACKED], ids=str)
def test_any_limits_on_a_device_read_keys_alone(size: Size) -> None:
    """A graph may write anything there. Results are then of no use, but finite: nothing beside the keys is read."""
    call = build(Case(size, "bfloat16", ("spans",)))
    given = Given(call, "cuda", FENCE)
    if reason := given.refusal("cuda"):
        pytest.skip(reason)
    limits = given.arguments["spans"].limits
    for low, high in ((-(2**31), 2**31 - 1), (-50, size.n_k + 50)):
        torch.manual_seed(0)
        limits.copy_(torch.randint(low, high, limits.shape, device="cuda"))
        out, _lse, *grads = given.step()
        assert all(x.isfinite().all() for x in (out, *grads))
