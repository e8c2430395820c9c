"""Calls like an earlier one: a cached call must not outlive what it depends on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from tests.gpu.oracle import standard
from tests.gpu.placement import same_bits
from tests.gpu.runner import each_backend

pytestmark = [pytest.mark.gpu, *each_backend]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def views() -> Iterator[tuple[str, Tensor]]:
    """The same numbers and shape, with other strides and alignments."""
    x = normal(2, 4, 65, 64)
    yield "plain", x
    yield "rows first", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "batch inside", x.transpose(0, 2).contiguous().transpose(0, 2)
    yield "sliced", torch.nn.functional.pad(x, (8, 8, 1, 2))[:, :, 1:66, 8:72]
    yield "columns apart", x.repeat_interleave(2, -1)[..., ::2]
    for offset in (1, 4, 8):
        room = torch.full((x.numel() + offset,), torch.nan, device="cuda", dtype=x.dtype)
        yield f"{offset} behind", room[offset:].view_as(x).copy_(x)
    yield "plain again", x.clone()


def test_other_strides_and_alignments() -> None:
    """In turn, each gives the same result, as input and as incoming gradient."""
    want = want_grad = None
    for name, x in views():
        q = x.detach().requires_grad_()
        for _ in range(2):
            out = ft.attention(q, x, x, causal=True)
            (grad,) = torch.autograd.grad(out, q, x)
            want, want_grad = (out, grad) if want is None else (want, want_grad)
            torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}")
            torch.testing.assert_close(grad, want_grad, rtol=2e-2, atol=2e-2, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_come_in_at_other_places() -> None:
    """q, k and v, whose alignment decides the backend, stay where they are."""
    q = normal(2, 4, 65, 64).requires_grad_()
    out, lse = ft.attention(q, q, q, causal=True, return_lse=True)
    slopes = normal(2, 4, 65, dtype=torch.float32)
    (want,) = torch.autograd.grad((out, lse), q, (q.detach(), slopes), retain_graph=True)
    for name, x in views():
        for offset in (0, 1, 4):
            room = torch.full((slopes.numel() + offset,), torch.nan, device="cuda")
            dlse = room[offset:].view_as(slopes).copy_(slopes)
            (grad,) = torch.autograd.grad((out, lse), q, (x, dlse), retain_graph=True)
            torch.testing.assert_close(grad, want, rtol=2e-2, atol=2e-2, msg=lambda m, name=name: f"{name}: {m}")


def test_other_numbers() -> None:
    """A scale, a window, a cap, a seed, lengths: each of the calls in turn, twice, without affecting the others."""
    q = normal(2, 4, 65, 64)
    lengths = torch.tensor([65, 30], device="cuda")
    calls: list[dict[str, Any]] = [
        *({"scale": x} for x in (0.1, 0.2, 1, 1.0)),
        *({"window": x} for x in ((1, 2), (2, 1), (None, 1), (1, None))),
        *({"band": ft.Band(3, 2, x)} for x in (0, 1, -1)),
        *({"softcap": x} for x in (0.5, 1.0)),
        *({"dropout": 0.5, "seed": x} for x in (0, 1, 2**63, 2**64 - 1)),
        *({"dropout": x, "seed": 1} for x in (0.25, 0.75)),
        *({"kv_lengths": x} for x in (lengths, lengths.int(), lengths.flip(0))),
        *({"out_dtype": x} for x in (None, torch.float32, torch.bfloat16)),
    ]
    first = [ft.attention(q, q, q, **options) for options in calls]
    again = [ft.attention(q, q, q, **options) for options in calls]
    assert all(same_bits(x, y) for x, y in zip(first, again, strict=True))
    for options, x in zip(calls, first, strict=True):
        there = {name: y.cpu() if isinstance(y, Tensor) else y for name, y in options.items()}
        want = ft.attention(q.cpu(), q.cpu(), q.cpu(), **there)
        torch.testing.assert_close(x.cpu(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"window": (1, 2)}, {"window": (1.0, 2)}),
        ({"window": (1, 2)}, {"window": (True, 2)}),
        ({"band": ft.Band(1, 2, 0)}, {"band": ft.Band(1.0, 2, 0)}),
        ({"dropout": 0.0}, {"dropout": False}),
        ({"seed": 1}, {"seed": 1.0}),
        ({"threads": 1}, {"threads": True}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 0.0}, {"softcap": False}),
        ({"deterministic": False}, {"deterministic": 0}),
    ],
    ids=str,
)
def test_a_wrong_call_after_a_right_one_that_equals_it(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    q = normal(2, 4, 65, 64)
    ft.attention(q, q, q, **right)
    with pytest.raises(ft.FlashtileError, match=f"^{next(iter(wrong))}"):
        ft.attention(q, q, q, **wrong)


def test_in_and_out_of_autograd() -> None:
    """Recorded, not recorded, only some inputs: the same output, and the requested gradients."""
    q, k, v = (normal(2, 4, 65, 64, seed=n) for n in range(3))
    bias = normal(65, 65, seed=4)
    plain = ft.attention(q, k, v, bias=bias)
    whole = None
    for wanted in ("qkvb", "q", "v", "b", "", "kb", "qkvb"):
        leaves = {
            name: x.detach().requires_grad_(name in wanted) for name, x in zip("qkvb", (q, k, v, bias), strict=True)
        }
        out = ft.attention(leaves["q"], leaves["k"], leaves["v"], bias=leaves["b"])
        assert same_bits(out, plain) and out.requires_grad == bool(wanted)
        if wanted:
            names = [name for name in "qkvb" if name in wanted]
            grads = dict(
                zip(names, torch.autograd.grad(out, [leaves[n] for n in names], torch.ones_like(out)), strict=True)
            )
            whole = whole or grads
            assert all(same_bits(x, whole[name]) for name, x in grads.items())


@pytest.mark.parametrize("rows", [65, 20_000])
def test_with_and_without_the_lse(rows: int) -> None:
    """The same output; and a returned lse stays as it was."""
    q, other = normal(1, 4, rows, 64), normal(1, 4, rows, 64, seed=1)
    out, lse = ft.attention(q, q, q, return_lse=True)
    kept = lse.clone()
    assert same_bits(ft.attention(q, q, q), out)
    ft.attention(other, other, other)
    assert same_bits(lse, kept)
    assert same_bits(ft.attention(q, q, q, return_lse=True)[1], kept)


def test_addresses_that_change() -> None:
    """Tensors of one shape, each at its own address; results of earlier calls stay as they were."""
    given = [tuple(normal(1, 8, 128, 64, seed=3 * n + m) for m in range(3)) for n in range(20)]
    turns = [0, 1, 0, *range(20), 19, 3]
    found = [ft.attention(*given[n]) for n in turns]
    for n, out in zip(turns, found, strict=True):
        want, _ = standard(*given[n])
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    assert same_bits(found[0], found[2]) and same_bits(found[1], found[4])


def test_a_thread_that_has_not_met_the_gpu() -> None:
    """Its first launch is one that other threads have made before."""
    q = normal(1, 8, 128, 64)
    ft.attention(q, q, q)
    want = ft.attention(q, q, q)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: ft.attention(q, q, q), range(16)))
    assert all(same_bits(x, want) for x in results)


def test_a_cache_that_grows() -> None:
    """One token per step: slices of one cache, 1 to 400 keys, against the lengths of the same cache and the oracle."""
    q = normal(1, 8, 1, 64)
    k, v = normal(1, 2, 512, 64, seed=1), normal(1, 2, 512, 64, seed=2)
    lengths = torch.zeros(1, device="cuda", dtype=torch.int32)
    for n in range(1, 401):
        lengths.fill_(n)
        grown = ft.attention(q, k[:, :, :n], v[:, :, :n], causal=True)
        torch.testing.assert_close(grown, ft.attention(q, k, v, kv_lengths=lengths, causal=True), rtol=1e-2, atol=1e-2)
        if n % 50 == 1:
            want, _ = standard(q, k[:, :, :n], v[:, :, :n])
            torch.testing.assert_close(grown.double(), want, rtol=2e-2, atol=2e-2)


def test_matmul_precision_is_heeded() -> None:
    """A change of torch's float32 precision between two calls applies to the second; and "highest" is exact."""
    q, k, v = (normal(1, 2, 129, 64, dtype=torch.float32, seed=n) for n in range(3))
    exact, _ = standard(q, k, v)
    before = torch.get_float32_matmul_precision()
    first = ft.attention(q, k, v)
    try:
        torch.set_float32_matmul_precision("high")
        between = ft.attention(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    assert same_bits(ft.attention(q, k, v), first)
    assert (first - exact).abs().max() < 1e-5
    assert (between - exact).abs().max() < 1e-2
