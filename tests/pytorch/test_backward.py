"""attention_backward() on tensors: eagerly, compiled, mapped, recorded; and the buffers that it adds to."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from flashtile.pytorch import operators
from tests.pytorch.samples import every_backend, randn
from tests.pytorch.test_operators import some

NAMES = ft.Grads._fields


def call(
    dtype: torch.dtype = torch.float64, backend: str = "auto", **options: Any
) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of attention_backward()."""
    q, k, v = (randn(*shape, dtype=dtype) for shape in ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6)))
    options |= {"backend": backend}
    out, lse = ft.attention(q, k, v, return_lse=True, **options)
    return [randn(*out.shape, dtype=out.dtype), q, k, v, out, lse], options


def by_autograd(given: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    dout, *leaves = (x.detach().clone().requires_grad_() for x in given[:4])
    named = {name: options[name].detach().clone().requires_grad_() for name in ("bias", "sink") if name in options}
    out = ft.attention(*leaves, **{**options, **named})
    return [*torch.autograd.grad(out, [*leaves, *named.values()], dout.detach())]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_those_of_autograd(backend: str, dtype: torch.dtype) -> None:
    given, options = call(dtype, backend, bias=randn(4, 9, 11, dtype=dtype), sink=randn(4, dtype=dtype), causal=True)
    found = ft.attention_backward(*given, **options)
    assert isinstance(found, ft.Grads)
    for x, y in zip(found, by_autograd(given, options), strict=True):
        assert x.dtype is dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@every_backend
def test_buffers_are_added_to_and_their_versions_rise(backend: str) -> None:
    given, options = call(torch.bfloat16, backend, bias=randn(9, 11, dtype=torch.bfloat16))
    fresh = ft.attention_backward(*given, grad_dtype=torch.float32, **options)
    assert [None if x is None else x.dtype for x in fresh] == [torch.float32] * 4 + [None]
    fused = torch.ones(2, 9, 4, 3, 8)  # dq beside other gradients
    into = ft.Grads(fused[:, :, :, 1].transpose(1, 2), None, None, torch.ones(9, 11), None)
    found = ft.attention_backward(*given, grad_dtype="float32", into=into, **options)
    assert found.dq is into.dq and found.dbias is into.dbias
    assert fused._version > 0 and into.dbias._version > 0
    torch.testing.assert_close(fused[:, :, :, 1], 1 + fresh.dq.transpose(1, 2))
    torch.testing.assert_close(into.dbias, 1 + fresh.dbias)
    assert bool((fused[:, :, :, ::2] == 1).all())
    torch.testing.assert_close(found.dk, fresh.dk, rtol=0, atol=0)
    with torch.inference_mode():
        buffer = torch.zeros_like(fresh.dk)
        assert (
            ft.attention_backward(*given, grad_dtype="float32", into=into._replace(dk=buffer), **options).dk is buffer
        )


def test_a_buffer_that_autograd_has_saved_is_not_changed_in_silence() -> None:
    given, options = call()
    leaf = torch.ones_like(given[1], requires_grad=True)
    buffer = torch.ones_like(leaf)
    product = (leaf * buffer).sum()
    ft.attention_backward(*given, into=ft.Grads(buffer, None, None, None, None), **options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "needs a gradient": (
        lambda q: torch.zeros_like(q, requires_grad=True),
        ft.UnsupportedError,
        "into.dq: .*requires_grad",
    ),
    "expanded": (lambda q: q.new_zeros(1, 4, 9, 8).expand(2, 4, 9, 8), ft.ShapeError, "into.dq: .*share memory"),
    "columns apart": (lambda q: q.new_zeros(2, 4, 9, 16)[..., ::2], ft.ShapeError, "into.dq: expected contiguous"),
    "the input": (lambda q: q, ft.ShapeError, "into.dq: .* got that of q"),
    "an array": (lambda q: q.numpy().copy(), ft.DTypeError, "into.dq: expected a torch tensor"),
    "meta": (lambda q: q.to("meta"), ft.DTypeError, "into.dq: expected a tensor on cpu"),
    "sparse": (lambda q: torch.zeros_like(q).to_sparse(), ft.DTypeError, "into.dq: expected a dense tensor"),
    "dtype": (lambda q: q.float(), ft.DTypeError, "into.dq: expected float64, got float32"),
    "shape": (lambda q: q[:1].clone(), ft.ShapeError, "into.dq: expected shape"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_buffers_that_cannot_be_added_to(name: str) -> None:
    make, error, message = ERRORS[name]
    given, options = call()
    with pytest.raises(error, match=message):
        ft.attention_backward(*given, into=ft.Grads(make(given[1]), None, None, None, None), **options)


@every_backend
def test_gradients_have_no_gradients(backend: str) -> None:
    given, options = call(backend=backend)
    given[1].requires_grad_()
    found = ft.attention_backward(*given, **options)
    with pytest.raises(ft.UnsupportedError, match="differentiated once"):
        found.dk.sum().backward()
    with torch.no_grad():
        assert not ft.attention_backward(*given, **options).dk.requires_grad


@every_backend
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(backend: str, dynamic: bool) -> None:
    torch.compiler.reset()
    given, options = call(torch.bfloat16, backend, bias=randn(9, 11, dtype=torch.bfloat16), causal=True)
    into = ft.Grads(*(torch.ones_like(x) for x in given[1:4]), torch.ones(9, 11).bfloat16(), None)
    into = ft.Grads(*(None if x is None else x.float() for x in into))

    def run(grad_dtype: Any, into: Any, *given: Tensor) -> Any:
        return ft.attention_backward(*given, grad_dtype=grad_dtype, into=into, **options)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for grad_dtype in (None, torch.float32):
        for x, y in zip(compiled(grad_dtype, None, *given), run(grad_dtype, None, *given), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    copies = [ft.Grads(*(None if x is None else x.clone() for x in into)) for _ in range(2)]
    compiled(torch.float32, copies[0], *given), run(torch.float32, copies[1], *given)
    for x, y in zip(*copies, strict=True):
        torch.testing.assert_close(x, y)
    wrong = copies[0]._replace(dk=copies[0].dk[..., :4])
    with pytest.raises(Exception, match=r"into.dk: expected shape"):
        compiled(torch.float32, wrong, *given)


def test_mapped() -> None:
    given, options = call(causal=True)
    whole = ft.attention_backward(*given, **options)
    found = torch.func.vmap(lambda *given: ft.attention_backward(*given, **options)[:3])(*given)
    for x, y in zip(found, whole[:3], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@every_backend
def test_opcheck(backend: str) -> None:
    given = some(torch.bfloat16, grad=False, bias=randn(9, 11).bfloat16(), sink=randn(4).float(), backend=backend)
    out, lse = operators.ATTENTION(*given)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for bias_grad, dtype in ((True, "float32"), (False, "bfloat16")):
        arguments = (torch.ones_like(out), None, out, lse, bias_grad, dtype, *given)
        torch.library.opcheck(operators.BLOCK_BACKWARD, arguments, test_utils=checks)
