"""torch.func: vmap(f) is f for each example, also under, inside and without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

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
def test_vmap_is_a_loop(name: str) -> None:
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

    for i in floats:
        arguments[i].requires_grad_()
    out, lse = vmap(function, dims)(*arguments)
    ((out * out.cos()).sum() + lse.square().sum()).backward()
    for i, each in zip(floats, per_example, strict=True):
        d = dims[i]
        torch.testing.assert_close(arguments[i].grad, each.sum(0) if d is None else each.movedim(0, d))


def test_vmap_of_vmap() -> None:
    x = randn(2, 3, 4, 9, 8)
    nested = vmap(vmap(lambda q: ft.attention(q, q, q, causal=True)))(x)
    torch.testing.assert_close(nested, ft.attention(*[x.flatten(0, 1)] * 3, causal=True).reshape(x.shape))


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
