"""merge() of tensors: the whole from its parts, gradients, and rows that saw no key."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import gradcheck, gradgradcheck

import flashtile as ft
from flashtile.pytorch.bridge import to_numpy
from tests.pytorch.samples import randn


def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int) -> tuple[torch.Tensor, ...]:
    a = ft.attention(q, k[..., :at, :], v[..., :at, :], return_lse=True)
    b = ft.attention(q, k[..., at:, :], v[..., at:, :], return_lse=True)
    return (*a, *b)


@pytest.mark.parametrize("at", [0, 3, 11])
def test_the_whole_from_its_parts(at: int) -> None:
    q, k, v = (randn(2, 4, n, 8, requires_grad=True) for n in (9, 11, 11))
    whole, lse = ft.attention(q, k, v, return_lse=True)
    merged, merged_lse = ft.merge(*parts(q, k, v, at))
    torch.testing.assert_close(merged, whole, atol=1e-13, rtol=0)
    torch.testing.assert_close(merged_lse, lse, atol=1e-13, rtol=0)
    wanted, found = (
        torch.autograd.grad((out * out.cos()).sum() + lse.square().sum(), (q, k, v))
        for out, lse in ((whole, lse), (merged, merged_lse))
    )
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_same_as_numpy() -> None:
    given = parts(*(randn(2, 4, 9, 8, dtype=torch.float32) for _ in range(3)), 4)
    for found, wanted in zip(ft.merge(*given), ft.merge(*(x.numpy() for x in given)), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-6)


def test_merging_with_an_empty_result_changes_nothing() -> None:
    out, lse = randn(3, 5, dtype=torch.float32), randn(3, dtype=torch.float32)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for found in (ft.merge(out, lse, *nothing), ft.merge(*nothing, out, lse)):
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    empty = ft.merge(*nothing, *nothing)
    assert torch.equal(empty[0], nothing[0]) and torch.equal(empty[1], nothing[1])


def test_gradients_of_rows_that_saw_no_key() -> None:
    lse_a = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf], requires_grad=True)
    lse_b = torch.tensor([-torch.inf, 0.0, 2.0, -torch.inf], requires_grad=True)
    out_a, out_b = randn(4, 3, dtype=torch.float32), randn(4, 3, dtype=torch.float32)
    out_a.requires_grad_(), out_b.requires_grad_()
    out, lse = ft.merge(out_a, lse_a, out_b, lse_b)
    (out.square().sum() + lse.exp().sum()).backward()
    for x in (out_a, lse_a, out_b, lse_b):
        assert x.grad.isfinite().all()
    assert lse_a.grad[1] == lse_b.grad[0] == lse_a.grad[3] == lse_b.grad[3] == 0


def test_finite_differences() -> None:
    given = tuple(randn(*shape, requires_grad=True) for shape in ((2, 3), (2,), (2, 3), (2,)))
    assert gradcheck(ft.merge, given) and gradgradcheck(ft.merge, given)


@pytest.mark.parametrize("of_lse", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_out", [torch.float16, torch.float32])
def test_every_pair_of_dtypes_as_in_numpy(of_out: torch.dtype, of_lse: torch.dtype) -> None:
    out_a, out_b = randn(9, 5, dtype=of_out), randn(9, 5, dtype=of_out).flip(0)
    lse_a, lse_b = (20 * randn(9)).to(of_lse), (20 * randn(9)).flip(0).to(of_lse)
    given = (out_a, lse_a, out_b, lse_b)
    for found, wanted in zip(ft.merge(*given), ft.merge(*map(to_numpy, given)), strict=True):
        assert found.dtype == getattr(torch, wanted.dtype.name)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=2 * np.finfo(wanted.dtype).eps, atol=1e-6)


def test_wrong_dtypes_and_shapes() -> None:
    half, lse = randn(2, 3, dtype=torch.bfloat16), randn(2, dtype=torch.float32)
    out, merged = ft.merge(half, lse, half, lse)
    assert out.dtype == torch.bfloat16 and merged.dtype == torch.float32
    with pytest.raises(ft.DTypeError, match=r"^lse_b: "):
        ft.merge(half, lse, half, lse.long())
    with pytest.raises(ft.ShapeError, match=r"^out_b: "):
        ft.merge(half, lse, half[:1], lse)
