"""merge() of tensors: the whole from its parts, gradients, and rows that saw no key."""

from __future__ import annotations

import re

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


def results_of(count: int, shape: tuple[int, ...] = (2, 4, 9)) -> list[torch.Tensor]:
    return [x for _ in range(count) for x in (randn(*shape, 8), randn(*shape))]


@pytest.mark.parametrize("count", [2, 3])
def test_one_pass_as_the_formula(count: int) -> None:
    """Without gradients the C++ core merges; with them torch does."""
    given = results_of(count)
    wanted = ft.merge(given[0].clone().requires_grad_(), *given[1:])
    for found, exact in zip(ft.merge(*given), wanted, strict=True):
        torch.testing.assert_close(found, exact.detach(), atol=1e-14, rtol=1e-14)


def test_into_in_place_of_a_view() -> None:
    out, lse, *part = (x.transpose(0, 1).clone().transpose(0, 1) for x in results_of(2, (2, 4, 18)))
    rows = slice(1, 18, 2)
    into, part = (out[:, :, rows], lse[:, :, rows]), [x[:, :, rows] for x in part]
    wanted, versions = ft.merge(*into, *part), [x._version for x in into]
    assert all(x is y for x, y in zip(ft.merge(*into, *part, into=into), into, strict=True))
    torch.testing.assert_close(into, wanted, rtol=0, atol=0)
    assert all(x._version > before for x, before in zip(into, versions, strict=True))


def test_into_float32_from_16_bits() -> None:
    half = [randn(9, 8, dtype=torch.bfloat16), randn(9, dtype=torch.float32)] * 2
    into = torch.full((9, 8), torch.nan), torch.full((9,), -torch.inf)
    for part in (half[:2], half[2:]):
        ft.merge(*into, *part, into=into)
    torch.testing.assert_close(into[0], half[0].float(), rtol=1e-6, atol=1e-6)


def test_a_saved_tensor_that_was_merged_into() -> None:
    """autograd notices, as for any operation in place."""
    out, lse, *part = results_of(2)
    x = torch.ones((), requires_grad=True, dtype=out.dtype)
    y = (x * out).sum()
    ft.merge(out, lse, *part, into=(out, lse))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("name", ["out_a", "lse_a", "out_b", "lse_b", "into[0]", "into[1]"])
def test_into_refuses_gradients_by_name(name: str) -> None:
    names = ["out_a", "lse_a", "out_b", "lse_b", "into[0]", "into[1]"]
    given = [x.requires_grad_(n == name) for n, x in zip(names, results_of(3), strict=True)]
    with pytest.raises(ft.UnsupportedError, match=f"^{re.escape(name)}: expected a tensor that needs no gradient"):
        ft.merge(*given[:4], into=(given[4], given[5]))
    with torch.no_grad():
        ft.merge(*given[:4], into=(given[4], given[5]))


@pytest.mark.parametrize("in_place", [False, True])
def test_into_traced(in_place: bool) -> None:
    """torch.compile and fake tensors see torch's own operations; the result is not rounded to out_a's dtype."""
    out, lse, part, part_lse, *into = results_of(3)
    half = part.half()

    def accumulate(out: torch.Tensor, lse: torch.Tensor, to: torch.Tensor, to_lse: torch.Tensor) -> torch.Tensor:
        merged, _ = ft.merge(half, part_lse, out, lse, into=(to, to_lse))
        return merged + 0

    first = (out, lse) if in_place else into
    wanted = ft.merge(half, part_lse, out, lse, into=tuple(x.clone() for x in into))
    found = torch.compile(accumulate, fullgraph=True, backend="eager")(out, lse, *first)
    torch.testing.assert_close((found, *first), (wanted[0], *wanted), atol=1e-14, rtol=1e-14)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        out, lse, *part = results_of(2)
        wanted = ft.merge(out, lse, *part)
        torch.testing.assert_close(ft.merge(out, lse, *part, into=(out, lse)), wanted, rtol=0, atol=0)
