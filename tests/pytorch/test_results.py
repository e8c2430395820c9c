"""Tensors and NumPy arrays give the same numbers: every option, every dtype, forward and backward."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from flashtile.numerics.dtypes import FLOATS
from tests.pytorch.samples import as_tensors, equal, every_backend, run, tensor
from tests.support.grid import OPTIONS, Call, Case, Size, build

BATCHED = Size(2, 4, 2, 13, 17, 8, 5)
PACKED = Size.packed(4, 2, 8, 5, (5, 9), (0, 3), (11, 11))


def agree(call: Call, backend: str) -> None:
    arrays = {"backend": backend, **call.packed, **call.options}
    want_out, want_lse = run(call.q, call.k, call.v, **arrays)
    want = ft.attention_backward(call.dout, call.q, call.k, call.v, want_out, want_lse, dlse=call.dlse, **arrays)

    (q, k, v), options = as_tensors(call)
    with torch.no_grad():
        out, lse = run(q, k, v, backend=backend, **options)
    assert out.is_contiguous() and lse.is_contiguous() and not out.requires_grad
    equal(out, want_out)
    equal(lse, want_lse)

    out, lse = run(q, k, v, backend=backend, **options)
    equal(out, want_out)
    torch.autograd.backward([out, lse], [tensor(call.dout), tensor(call.dlse)])
    given = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias"), "dsink": options.get("sink")}
    for name, x in given.items():
        if x is not None:
            equal(x.grad, getattr(want, name))


@every_backend
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option: str, backend: str) -> None:
    agree(build(Case(BATCHED, "float32", (option,))), backend)


@every_backend
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [BATCHED, PACKED], ids=["batched", "packed"])
def test_every_dtype(dtype: str, size: Size, backend: str) -> None:
    agree(build(Case(size, dtype, ("everything",))), backend)


@every_backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_unrounded_output(dtype: str, backend: str) -> None:
    agree(build(Case(BATCHED, dtype, ("causal",), wide_out=True)), backend)
    (q, k, v), _ = as_tensors(build(Case(BATCHED, dtype)))
    assert ft.attention(q, k, v, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("rank", [2, 3])
def test_lower_ranks(rank: int) -> None:
    whole, _ = as_tensors(build(Case(Size(1, 1, 1, 7, 9, 4, 6), "float32")))
    lower = [x.detach()[(0,) * (4 - rank)].requires_grad_() for x in whole]
    for tensors in (whole, lower):
        out, lse = ft.attention(*tensors, causal=True, return_lse=True)
        assert lse.shape == out.shape[:-1]
        (out.square().sum() + lse.sum()).backward()
    for x, y in zip(whole, lower, strict=True):
        assert torch.equal(x.grad.reshape(y.shape), y.grad)
