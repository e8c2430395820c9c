"""Results and gradients have the order in memory of q, k and v, so that a model need not copy them."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile as ft
from flashtile.pytorch import operators
from flashtile.pytorch.operands import operands
from tests.pytorch.samples import every_backend, randn

B, H, N, D = 2, 4, 33, 16
ORDERS = [*permutations(range(3))]


def in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """A dense copy of x whose axes but the last lie in this order in memory."""
    order = (*order, 3)
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


def projected(fused: bool) -> list[Tensor]:
    """The results of projections."""
    if fused:
        return [randn(B, N, 3 * H * D, dtype=torch.float32).requires_grad_()]
    return [(randn(B, N, H * D, dtype=torch.float32) + n).requires_grad_() for n in range(3)]


def heads(leaves: list[Tensor]) -> list[Tensor]:
    """q, k and v, as a model views the results of projections."""
    parts = leaves if len(leaves) == 3 else leaves[0].unflatten(2, (3, H * D)).unbind(2)
    return [x.unflatten(2, (H, D)).transpose(1, 2) for x in parts]


@every_backend
@pytest.mark.parametrize("order", ORDERS)
def test_results_have_the_order_of_their_inputs(backend: str, order: tuple[int, ...]) -> None:
    given = [in_order(randn(*shape), order) for shape in ((B, H, N, D), (B, 2, 40, D), (B, 2, 40, 8), (B, H, N, 8))]
    plain = [x.contiguous() for x in given]
    *qkv, dout = given
    out, lse = ft.attention(*qkv, return_lse=True, backend=backend)
    want, want_lse = ft.attention(*plain[:3], return_lse=True, backend=backend)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert out.stride() == dout.stride() and lse.is_contiguous()
    leaves = [x.requires_grad_() for x in qkv]
    grads = torch.autograd.grad(ft.attention(*leaves, backend=backend), leaves, dout)
    wanted = ft.attention_backward(plain[3], *plain[:3], want, want_lse, backend=backend)
    for x, y, like in zip(grads, wanted[:3], qkv, strict=True):
        assert torch.equal(x, y) and x.stride() == like.stride()
    arrays = [x.detach().numpy() for x in qkv]
    found = ft.attention(*arrays, backend=backend)
    assert found.strides == dout.numpy().strides
    np.testing.assert_array_equal(found, want.numpy())


@every_backend
@pytest.mark.parametrize("fused", [False, True])
def test_strides_are_those_of_torch_and_nothing_is_copied(backend: str, fused: bool) -> None:
    leaves = projected(fused)
    qkv = heads(leaves)
    copies = Copies()
    with copies:
        out = ft.attention(*qkv, backend=backend)
        rows = out.transpose(1, 2).reshape(B, N, H * D)
    assert rows.data_ptr() == out.data_ptr() and not copies.found
    theirs = scaled_dot_product_attention(*qkv)
    assert out.stride() == theirs.stride()
    dout = torch.ones_like(rows)
    ours = torch.autograd.grad(rows, qkv, dout, retain_graph=True)
    for x, y in zip(ours, torch.autograd.grad(theirs.transpose(1, 2).flatten(2), qkv, dout), strict=True):
        assert x.stride() == y.stride()
    with copies:
        torch.autograd.grad(rows, leaves, dout)
    assert not copies.found - {"aten::stack"}  # of the gradients of a fused projection's parts


class Copies(TorchDispatchMode):
    """Notes operations that copy a tensor of rank 4 or move its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := function._schema.name) in ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::stack"):
            self.found.add(name)
        return function(*args, **kwargs or {})


VIEWS = {
    **{str(order): lambda order=order: in_order(randn(B, H, N, D), order) for order in ORDERS},
    "fused": lambda: heads(projected(True))[0],
    "expanded": lambda: randn(1, H, N, D).expand(B, H, N, D),
    "one head": lambda: randn(B, N, 1, D).transpose(1, 2),
    "columns apart": lambda: randn(B, N, H, 2 * D).transpose(1, 2)[..., ::2],
    "columns outside": lambda: randn(B, D, H, N).permute(0, 2, 3, 1),
    "rank 3": lambda: randn(N, H, D).transpose(0, 1),
    "rank 2": lambda: randn(D, N).T,
    "empty": lambda: randn(B, 0, H, D).transpose(1, 2),
}


@every_backend
@pytest.mark.parametrize("name", VIEWS)
def test_fakes_have_the_strides_of_the_results(backend: str, name: str) -> None:
    x = VIEWS[name]().detach()
    call = operands(x, x.clone(), x, backend, {})
    results = operators.ATTENTION(*call)
    gradients = operators.ATTENTION_BACKWARD(torch.ones_like(results[0]), None, *results, False, *call)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = call._replace(**{name: mode.from_tensor(getattr(call, name)) for name in "qkv"})
        out, lse = operators.ATTENTION(*fake)
        fakes = (out, lse, *operators.ATTENTION_BACKWARD(torch.ones_like(out), None, out, lse, False, *fake))
    for x, y in zip((*results, *gradients), fakes, strict=True):
        assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_compiled(fused: bool, dynamic: bool) -> None:
    torch.compiler.reset()

    def model(*leaves: Tensor) -> Any:
        out: Tensor = ft.attention(*heads([*leaves]), causal=True)
        return out.transpose(1, 2).flatten(2), out.stride()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found = []
    for run in (model, compiled):
        leaves = projected(fused)
        out, strides = run(*leaves)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        assert strides == (N * H * D, D, H * D, 1)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_packed_sequences() -> None:
    heads_first = randn(H, N, D).transpose(0, 1)
    for x in (heads_first, heads_first.contiguous()):
        out = ft.attention_packed(x, x, x, [0, 5, N], [0, 5, N])
        assert out.stride() == x.stride()
