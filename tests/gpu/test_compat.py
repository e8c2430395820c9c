"""Calls of other libraries on a GPU, compared with the CPU in float64; the host does not wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from flashtile.compat import flash_attn as fa
from flashtile.compat.sdpa import scaled_dot_product_attention
from tests.gpu.synchronization import no_waiting

pytestmark = [pytest.mark.gpu]


def moved(x: Any, dtype: torch.dtype, device: str) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(device=device, dtype=dtype if x.is_floating_point() else None, copy=True)


def check(call: Callable[..., Any], *given: Any, **options: Any) -> None:
    """Compare float16 on a GPU with float64 on the CPU, including tensors that the call writes to."""
    results = []
    for dtype, device in ((torch.float64, "cpu"), (torch.float16, "cuda")):
        args = [moved(x.half() if isinstance(x, Tensor) and x.is_floating_point() else x, dtype, device) for x in given]
        more = {name: moved(x, dtype, device) for name, x in options.items()}
        if device == "cuda":
            call(*[moved(x, dtype, device) for x in args], **more)  # compiles
        with no_waiting() if device == "cuda" else nullcontext():
            found = call(*args, **more)
        results.append([*(found if isinstance(found, tuple) else (found,)), *args])
    for want, got in zip(*results, strict=True):
        if isinstance(want, Tensor) and want.is_floating_point():
            torch.testing.assert_close(got.cpu().double(), want.double(), rtol=2e-3, atol=2e-3)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_sdpa() -> None:
    q, k, v = normal(2, 4, 200, 64), normal(2, 2, 300, 64), normal(2, 2, 301, 64)[:, :, :300]
    check(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    check(scaled_dot_product_attention, q, k, v, normal(200, 300) > 0, enable_gqa=True)
    check(scaled_dot_product_attention, q, k, v, normal(2, 1, 200, 300), enable_gqa=True)


def test_functions_of_flash_attn() -> None:
    q, k, v = normal(2, 200, 4, 64), normal(2, 300, 2, 64), normal(2, 301, 2, 64)[:, :300]
    check(fa.flash_attn_func, q, k, v, causal=True, window_size=(50, 0), softcap=10.0, return_attn_probs=True)
    check(fa.flash_attn_qkvpacked_func, normal(2, 200, 3, 4, 64), causal=True)
    starts = torch.tensor([0, 90, 90, 200], dtype=torch.int32)
    check(fa.flash_attn_varlen_qkvpacked_func, normal(200, 3, 4, 64), starts, 110, causal=True, return_attn_probs=True)


@pytest.mark.parametrize("paged", [False, True], ids=["in one piece", "in pages"])
def test_a_cache_that_grows(paged: bool) -> None:
    caches = (normal(8, 64, 2, 64), normal(8, 64, 2, 64)) if paged else (normal(2, 256, 2, 64), normal(2, 256, 2, 64))
    table = torch.tensor([[3, 0, 5, 1], [7, 2, 6, 4]], dtype=torch.int32) if paged else None
    positions = torch.arange(256)[:, None] * 0.01 ** (torch.arange(16) / 16)
    check(
        fa.flash_attn_with_kvcache,
        *(normal(2, 3, 4, 64), *caches, normal(2, 3, 2, 64), normal(2, 3, 2, 64), positions.cos(), positions.sin()),
        cache_seqlens=torch.tensor([100, 253], dtype=torch.int32),
        block_table=table,
        causal=True,
    )
