"""Memory on a GPU, measured: a forward pass adds the lse, a backward pass O(N d); too little memory is an error."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from tests.gpu.runner import each_backend

pytestmark = [pytest.mark.gpu, *each_backend]

N, H, D = 16384, 2, 64
MIB = 1 << 20
SLACK = MIB  # for what does not grow with N


def tensors(n: int = N, heads: int = H, dim: int = D, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.cuda.empty_cache()  # otherwise they may lie in a larger block, whose rest room() does not count
    return [torch.randn(1, heads, n, dim, device="cuda", dtype=dtype) for _ in range(3)]


def added(function: Callable[[], tuple[Tensor, ...]]) -> int:
    """The peak of bytes allocated while function ran, beyond those before it and those of its results."""
    function()  # compiles
    gc.collect()  # what compiling left behind would otherwise be freed while the peak is measured
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    results = function()
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return int(peak) - sum(x.nbytes for x in results)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {},
    "causal": lambda: {"causal": True},
    "window": lambda: {"window": (1000, 0)},
    "scores": lambda: {"softcap": 3.0, "alibi": torch.ones(H, device="cuda"), "sink": torch.zeros(H, device="cuda")},
    "dropout": lambda: {"dropout": 0.1, "seed": 5},
    "kv_lengths": lambda: {"kv_lengths": torch.tensor([N - 5], device="cuda")},
    "keys": lambda: {"mask": torch.arange(N, device="cuda") % 7 > 0, "bias": torch.zeros(N, device="cuda")},
}
STATISTICS = H * N * 4  # bytes of an lse


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_adds_nothing(name: str) -> None:
    """Less than 1 MiB besides out and lse; the scores would be 1 GiB."""
    (q, k, v), options = tensors(), OPTIONS[name]()
    assert added(lambda: ft.attention(q, k, v, return_lse=True, **options)) <= SLACK
    assert added(lambda: (ft.attention(q, k, v, **options),)) <= STATISTICS + SLACK


@pytest.mark.parametrize("name", OPTIONS)
def test_backward_is_linear(name: str) -> None:
    """Besides the gradients O(N d): numbers per row, and at most dq once more in float32; the scores would be 1 GiB."""
    (q, k, v), options = [x.requires_grad_() for x in tensors()], OPTIONS[name]()
    out, lse = ft.attention(q, k, v, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)

    assert added(backward) <= 2 * q.nbytes + 4 * STATISTICS + SLACK


@pytest.mark.parametrize("deterministic", [False, True], ids=["in any order", "in order"])
def test_backward_adds_delta_and_dq(deterministic: bool) -> None:
    """No more than dQ in float32, three numbers per row (delta, an lse in two parts), and counters per tile."""
    q, k, v = [x.requires_grad_() for x in tensors(heads=16, dim=128)]
    out = ft.attention(q, k, v, causal=True, deterministic=deterministic)
    dout = torch.randn_like(out)
    delta = 4 * q.numel() // q.shape[-1]

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    counters = 3 * delta // 32  # a flag for 64 rows, a turn for each 64 x 64 of dQ, and as much to round up
    assert added(backward) <= 2 * q.nbytes + 3 * delta + counters


def test_packed_adds_nothing() -> None:
    q, k, v = (torch.randn(N, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 5, 5, 8000, N], device="cuda", dtype=torch.int32)
    assert added(lambda: ft.attention_packed(q, k, v, cu, cu, causal=True, return_lse=True)) <= SLACK


def test_what_is_saved_for_the_backward_pass() -> None:
    """The inputs, out and lse; only the last two are new."""
    q, k, v = (x.requires_grad_() for x in tensors())
    ft.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = ft.attention(q, k, v, causal=True)
    assert torch.cuda.memory_allocated() - before <= out.nbytes + STATISTICS + SLACK


def test_decode_adds_its_shares() -> None:
    """Split keys leave partial results: they depend on the processors, not on the keys."""
    q = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    added_by = []
    for n in (16384, 131072):
        k, v = (torch.randn(1, 2, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        added_by.append(added(lambda k=k, v=v: ft.attention(q, k, v, return_lse=True)))
    assert max(added_by) <= SLACK


def test_a_bias_of_all_pairs_is_not_copied() -> None:
    """512 MiB of it, in bfloat16: it is not widened."""
    (q, k, v), bias = tensors(), torch.zeros(N, N, device="cuda", dtype=torch.bfloat16)
    assert added(lambda: ft.attention(q, k, v, bias=bias, return_lse=True)) <= SLACK


@contextmanager
def room(more: int) -> Iterator[None]:
    """Within it, this process may allocate only this many bytes beyond what it has."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + more) / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def still_works() -> bool:
    q, k, v = tensors(n=65)
    out = ft.attention(q, k, v, causal=True)
    return bool(out.isfinite().all())


def test_no_memory_for_the_output() -> None:
    """An expanded q takes no memory itself; its output would take 1 GiB."""
    q, k, v = tensors(n=1024, heads=1)
    q, k, v = (x.expand(8192, 1, 1024, D) for x in (q, k, v))
    with room(64 * MIB), pytest.raises(torch.OutOfMemoryError):
        ft.attention(q, k, v)
    assert still_works()


def test_more_than_any_gpu_has() -> None:
    q, k, v = (x.expand(1 << 16, 16, 4096, D) for x in tensors(n=4096, heads=1))
    with pytest.raises(torch.OutOfMemoryError):
        ft.attention(q, k, v)
    assert still_works()


def test_no_memory_in_the_backward_pass() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(n=65536, heads=8))
    out = ft.attention(q, k, v, causal=True)
    dout = torch.ones_like(out)
    with room(32 * MIB), pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    assert still_works()
    grads = torch.autograd.grad(out, (q, k, v), dout)  # now there is enough
    assert all(x.isfinite().all() for x in grads)


def test_errors_leave_no_memory_behind() -> None:
    q, k, v = (x.expand(8192, 1, 1024, D) for x in tensors(n=1024, heads=1))
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        with room(64 * MIB), pytest.raises(torch.OutOfMemoryError):
            ft.attention(q, k, v)
    assert torch.cuda.memory_allocated() <= before + SLACK
