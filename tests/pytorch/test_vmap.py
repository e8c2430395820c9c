"""torch.func: vmap(f) equals f for each example, with gradients outside, inside and not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap

import flashtile as ft
from tests.pytorch.samples import randn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

N = 3
CU_Q, CU_K = torch.tensor([0, 3, 9]), torch.tensor([0, 5, 11])
BATCHED = ((N, 2, 4, 9, 8), (N, 2, 2, 11, 8), (N, 2, 2, 11, 6))
LENGTHS = torch.tensor([[3, 4], [0, 6], [7, 11]])

CASES: dict[str, tuple[dict[str, Any], tuple[int | None, ...], tuple[Any, ...]]] = {
    "rank 2": ({}, (0, 0, 0), ((N, 9, 8), (N, 11, 8), (N, 11, 6))),
    "rank 3": ({"causal": True}, (1, None, 0), ((4, N, 9, 8), (2, 11, 8), (N, 2, 11, 6))),
    "rank 4": ({"window": (3, 1)}, (0, 1, None), ((N, 2, 4, 9, 8), (2, N, 2, 11, 8), (2, 2, 11, 6))),
    "origin": (
        {"dropout": 0.4, "seed": 3, "origin": ft.Origin(3, 5, 1, 2, 6, 2, 3)},
        (0, None, 4),
        ((N, 2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6, N)),
    ),
    "dropout": ({"dropout": 0.4, "seed": 3}, (0, None, 4), ((N, 2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6, N))),
    "bias": ({"names": ["bias"]}, (0, 0, 0, 0), (*BATCHED, (N, 4, 1, 11))),
    "bias of the batch": ({"names": ["bias"]}, (0, 0, 0, 1), (*BATCHED, (2, N, 4, 9, 11))),
    "bias shared": ({"names": ["bias"]}, (0, 0, 0, None), (*BATCHED, (9, 11))),
    "bias of the batch shared": ({"names": ["bias"]}, (0, 0, 0, None), (*BATCHED, (2, 1, 9, 1))),
    "sink": ({"names": ["sink"]}, (0, 0, 0, 0), (*BATCHED, (N, 4))),
    "sink shared": ({"names": ["sink"]}, (0, 0, 0, None), (*BATCHED, (4,))),
    "alibi": ({"alibi": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)}, (0, 0, 0), BATCHED),
    "mask": ({"mask": torch.ones(9, 11, dtype=torch.bool).tril(2)}, (0, 0, 0), BATCHED),
    "lengths": ({"names": ["kv_lengths"], "causal": True}, (0, 0, 0, 0), (*BATCHED, LENGTHS)),
    "lengths shared": ({"kv_lengths": LENGTHS[2]}, (0, 0, 0), BATCHED),
    "packed": ({"cu_q": CU_Q, "cu_k": CU_K}, (0, 0, 0), ((N, 9, 4, 8), (N, 11, 2, 8), (N, 11, 2, 6))),
}


@pytest.mark.parametrize("name", CASES)
def test_vmap_equals_a_loop(name: str) -> None:
    options, dims, given = CASES[name]
    options = dict(options)
    names = options.pop("names", [])
    arguments = [randn(*x) if isinstance(x, tuple) else x for x in given]
    floats = tuple(i for i, x in enumerate(arguments) if x.is_floating_point())

    def function(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        run = ft.attention_packed if "cu_q" in options else ft.attention
        out, lse = run(q, k, v, return_lse=True, **options, **dict(zip(names, rest, strict=True)))
        return out, lse.masked_fill(lse == -torch.inf, 0)

    def loss(*x: Any) -> Any:
        out, lse = function(*x)
        return (out * out.cos()).sum() + lse.square().sum()

    def looped(f: Callable[..., Any]) -> list[torch.Tensor]:
        examples = [
            [x if d is None else x.select(d, i) for x, d in zip(arguments, dims, strict=True)] for i in range(N)
        ]
        return [torch.stack(each) for each in zip(*(f(*x) for x in examples), strict=True)]

    torch.testing.assert_close(list(vmap(function, dims)(*arguments)), looped(function))

    per_example = looped(grad(loss, floats))
    torch.testing.assert_close(list(vmap(grad(loss, floats), dims)(*arguments)), per_example)

    def loss_of_all(*x: Any) -> Any:
        out, lse = vmap(function, dims)(*x)
        return (out * out.cos()).sum() + lse.square().sum()

    wanted = [
        each.sum(0) if dims[i] is None else each.movedim(0, dims[i])
        for i, each in zip(floats, per_example, strict=True)
    ]
    torch.testing.assert_close(list(grad(loss_of_all, floats)(*arguments)), wanted)

    for i in floats:
        arguments[i].requires_grad_()
    loss_of_all(*arguments).backward()
    torch.testing.assert_close([arguments[i].grad for i in floats], wanted)


def test_vmap_of_vmap() -> None:
    x = randn(2, 3, 4, 9, 8)
    nested = vmap(vmap(lambda q: ft.attention(q, q, q, causal=True)))(x)
    torch.testing.assert_close(nested, ft.attention(*[x.flatten(0, 1)] * 3, causal=True).reshape(x.shape))


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5), (1, 2, 5, 5), (0, 2, 5, 5)])
def test_gradients_of_an_empty_batch(shape: tuple[int, ...]) -> None:
    """A bias shared by no sequences has the gradient 0."""
    q, bias = randn(N, 0, 2, 5, 4), randn(N, *shape)
    found = vmap(grad(lambda q, b: ft.attention(q, q, q, bias=b).sum(), (0, 1)))(q, bias)
    torch.testing.assert_close(found, (torch.zeros_like(q), torch.zeros_like(bias)))


def test_vmap_over_an_empty_axis() -> None:
    """Also where vmap makes one call after another: with dropout, a mapped sink, or packed sequences."""
    q, sink, cu = torch.randn(0, 4, 5, 8, requires_grad=True), torch.randn(0, 4), torch.tensor([0, 5])
    calls = (
        lambda q, sink: ft.attention(q, q, q, dropout=0.1),
        lambda q, sink: ft.attention(q, q, q, sink=sink),
        lambda q, sink: ft.attention_packed(*3 * (q.transpose(0, 1),), cu, cu).transpose(0, 1),
    )
    for call in calls:
        out = torch.func.vmap(call)(q, sink)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_numpy_numbers() -> None:
    x = randn(N, 4, 9, 8)
    options = {"scale": np.float32(0.5), "window": [np.int64(3), None], "causal": np.bool_(True)}
    torch.testing.assert_close(vmap(lambda q: ft.attention(q, q, q, **options))(x), ft.attention(x, x, x, **options))


@pytest.mark.parametrize("out_dtype", [torch.float32, "float32", np.float32, np.dtype("float32")], ids=str)
def test_every_form_of_out_dtype(out_dtype: Any) -> None:
    x = randn(N, 4, 9, 8, dtype=torch.bfloat16)

    def loss(q: Any) -> Any:
        return ft.attention(q, q, q, out_dtype=out_dtype).square().sum()

    q = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(q), q)
    (recorded,) = torch.autograd.grad(loss(q), q, create_graph=True)
    for found in (recorded, grad(loss)(x), vmap(grad(loss))(x)):
        torch.testing.assert_close(found, wanted)


def test_gradients_between_two_vmaps() -> None:
    x = randn(2, 3, 4, 9, 8)

    def loss(q: Any) -> Any:
        return ft.attention(q, q, q, causal=True).square().sum()

    wanted = vmap(vmap(grad(loss)))(x)
    torch.testing.assert_close(vmap(grad(lambda x: vmap(loss)(x).sum()))(x), wanted)
    torch.testing.assert_close(grad(lambda x: vmap(vmap(loss))(x).sum())(x), wanted)


def test_a_vjp_called_after_its_transform() -> None:
    x, dout = randn(N, 4, 9, 8), randn(N, 4, 9, 8)
    _, back = vjp(vmap(lambda q: ft.attention(q, q, q)), x)
    q = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(ft.attention(q, q, q), q, dout)
    torch.testing.assert_close(back(dout)[0], wanted)


def test_second_derivatives_are_refused() -> None:
    """In every way to request them; where torch did not, it would take them to be zero."""
    x = randn(4, 9, 8)

    def loss(q: Any) -> Any:
        return ft.attention(q, q, q).square().sum()

    def after(x: Any) -> Any:
        return torch.autograd.grad(grad(loss)(x.requires_grad_()).sum(), x)

    def mapped(x: Any) -> Any:
        return vmap(loss)(x).sum()

    inner = (grad(loss), grad(mapped), vmap(grad(lambda q: loss(q[None]))))
    for first in inner:
        with pytest.raises(ft.UnsupportedError, match="differentiated once"):
            grad(lambda x, first=first: first(x).sum())(x)
        with pytest.raises(ft.UnsupportedError, match="forward-mode"):
            jvp(first, (x,), (x,))
    with pytest.raises(ft.UnsupportedError, match="differentiated once"):
        after(x.clone())
    with torch.no_grad():
        torch.testing.assert_close(grad(loss)(x.clone().requires_grad_()), grad(loss)(x))


@pytest.mark.parametrize("ways", [(vmap,), (vmap, vmap)], ids=["once", "twice"])
def test_forward_mode_is_refused_under_vmap(ways: Any) -> None:
    def function(q: Any) -> Any:
        return ft.attention(q, q, q)

    for way in ways:
        function = way(function)
    x = randn(2, 3, 4, 9, 8)
    with pytest.raises(ft.UnsupportedError, match="forward-mode"):
        jvp(function, (x,), (x,))
    with pytest.raises(ft.UnsupportedError, match="forward-mode"):
        vmap(lambda x: jvp(lambda q: ft.attention(q, q, q), (x,), (x,)))(x)


def test_gradients_of_slopes_are_refused_under_vmap() -> None:
    x, slopes = randn(N, 2, 9, 8), randn(N, 2)
    with pytest.raises(ft.UnsupportedError, match=r"^alibi: "):
        grad(lambda a: vmap(lambda q, a: ft.attention(q, q, q, alibi=a))(x, a).sum())(slopes)


def test_jacobian() -> None:
    q, k, v = randn(3, 2), randn(4, 2), randn(4, 2)
    wanted = torch.autograd.functional.jacobian(lambda q: ft.attention(q, k, v), q)
    torch.testing.assert_close(jacrev(lambda q: ft.attention(q, k, v))(q), wanted)


def test_an_ensemble_of_modules() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(randn(8, 8) + seed)
            self.sink = torch.nn.Parameter(randn(2) + seed)

        def forward(self, x: torch.Tensor) -> Any:
            return ft.attention(x @ self.weight, x, x, sink=self.sink)

    layers = [Layer(i) for i in range(N)]
    parameters, buffers = stack_module_state(layers)
    x = randn(2, 5, 8)
    together = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))
