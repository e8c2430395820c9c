"""Under autocast, attention uses the same dtypes as torch's own attention."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashtile as ft
from tests.pytorch.samples import randn


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_are_cast(dtype: torch.dtype, grad: bool) -> None:
    q, k, v = (randn(2, 4, 9, 8, dtype=torch.float32, requires_grad=grad) for _ in range(3))
    with torch.autocast("cpu", dtype):
        out, lse = ft.attention(q, k, v, causal=True, return_lse=True)
        assert out.dtype == scaled_dot_product_attention(q, k, v).dtype == dtype
        assert lse.dtype == torch.float32
    assert torch.equal(out, ft.attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True))
    if grad:
        out.sum().backward()
        assert q.grad.dtype == torch.float32


def test_mixed_dtypes_are_cast_to_one() -> None:
    q, k = randn(2, 9, 8, dtype=torch.float32), randn(2, 9, 8, dtype=torch.bfloat16)
    bias, sink = randn(9, 9, dtype=torch.float32, requires_grad=True), randn(2, dtype=torch.float16)
    with pytest.raises(ft.DTypeError, match=r"^k: "):
        ft.attention(q, k, k)
    with torch.autocast("cpu", torch.bfloat16):
        out = ft.attention(q, k, k, bias=bias, sink=sink)
    assert torch.equal(out, ft.attention(q.bfloat16(), k, k, bias=bias, sink=sink.bfloat16()))
    out.sum().backward()
    assert bias.grad.dtype == torch.float32


def test_float64_is_not_cast() -> None:
    q = randn(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert ft.attention(q, q, q).dtype == torch.float64


def test_disabled_autocast_casts_nothing() -> None:
    q = randn(9, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert ft.attention(q, q, q).dtype == torch.float32
