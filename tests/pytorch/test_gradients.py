"""Gradients against finite differences, and errors where there are none."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import forward_ad, gradcheck

import flashtile as ft
from flashtile import dispatch
from flashtile.pytorch import run as kernel
from tests.pytorch.samples import BACKENDS, as_tensors, every_backend, randn, run
from tests.support.grid import OPTIONS, Case, Size, build

TINY = Size(2, 2, 1, 3, 4, 2, 2)
TINY_PACKED = Size.packed(2, 1, 2, 2, (2, 3), (0, 1), (3, 2))


def differentiate(case: Case, backend: str) -> None:
    (q, k, v), options = as_tensors(build(case))
    names = [name for name in ("bias", "sink") if name in options]

    def function(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        out, lse = run(q, k, v, backend=backend, threads=1, **(options | dict(zip(names, rest, strict=True))))
        return out, lse.masked_fill(lse == -torch.inf, 0)  # finite differences cannot handle infinities

    assert gradcheck(function, (q, k, v, *(options[name] for name in names)))


@every_backend
@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "sink of nothing"])
def test_finite_differences(option: str, backend: str) -> None:
    differentiate(Case(TINY, "float64", (option,)), backend)


@every_backend
@pytest.mark.parametrize("option", ["causal", "bias", "everything"])
def test_finite_differences_of_packed_sequences(option: str, backend: str) -> None:
    differentiate(Case(TINY_PACKED, "float64", (option,)), backend)


@every_backend
def test_gradients_through_the_lse_alone(backend: str) -> None:
    q, k, v = (randn(2, 3, 2, requires_grad=True) for _ in range(3))
    assert gradcheck(lambda q, k: ft.attention(q, k, v, return_lse=True, backend=backend)[1], (q, k))


@every_backend
@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sink"])
def test_gradients_of_one_input_alone(wanted: str, backend: str) -> None:
    shapes = {"q": (2, 4, 5, 3), "k": (2, 2, 6, 3), "v": (2, 2, 6, 2), "bias": (5, 1), "sink": (4,)}
    whole = {name: randn(*shape, requires_grad=True) for name, shape in shapes.items()}
    alone = {name: randn(*shape, requires_grad=name == wanted) for name, shape in shapes.items()}
    for given in (whole, alone):
        ft.attention(**given, backend=backend).square().sum().backward()
    assert torch.equal(alone[wanted].grad, whole[wanted].grad)
    assert all(x.grad is None for name, x in alone.items() if name != wanted)


def test_the_gradient_of_a_bias_is_computed_only_if_required(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    row = next(row for row in dispatch.TABLE if row.name == "tiles").load()
    backward = row.backward
    monkeypatch.setattr(row, "backward", lambda *a, **k: asked.append(k["bias_grad"]) or backward(*a, **k))
    for needed in (False, True):
        q, bias = randn(3, 2, requires_grad=True), randn(3, 3, requires_grad=needed)
        ft.attention(q, q, q, bias=bias, backend="tiles").sum().backward()
        assert (bias.grad is not None) == needed
    assert asked == [False, True]


@every_backend
def test_strides_of_the_incoming_gradient(backend: str) -> None:
    tensors = [randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
    grads = []
    for spread in (lambda out: out.sum(), lambda out: (out * torch.ones_like(out)).sum(), lambda out: out.mT.sum()):
        grads.append(torch.autograd.grad(spread(ft.attention(*tensors, causal=True, backend=backend)), tensors))
    for other in grads[1:]:
        assert all(torch.equal(x, y) for x, y in zip(grads[0], other, strict=True))


@every_backend
@pytest.mark.parametrize("layout", ["rows first", "expanded", "sliced", "strided columns"])
def test_strides_of_the_inputs(layout: str, backend: str) -> None:
    def lay(x: torch.Tensor) -> torch.Tensor:
        match layout:
            case "rows first":
                return x.transpose(1, 2).contiguous().transpose(1, 2)
            case "expanded":
                return x[:, :1, :1].expand(x.shape)
            case "sliced":
                return torch.cat([x, x], -2)[:, :, : x.shape[2]]
        return torch.cat([x, x], -1)[..., ::2]

    for grad in (False, True):
        q = randn(2, 3, 5, 4, dtype=torch.float32, requires_grad=grad)
        want = ft.attention(*(lay(q).contiguous() for _ in range(3)), causal=True, backend=backend)
        found = ft.attention(lay(q), lay(q), lay(q), causal=True, backend=backend)
        assert torch.equal(found, want) and found.is_contiguous() == (layout != "rows first")
        if grad:
            assert torch.equal(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (want, found)))


def test_without_autograd() -> None:
    q = randn(2, 5, 4, requires_grad=True)
    with torch.no_grad():
        assert not ft.attention(q, q, q).requires_grad
    with torch.inference_mode():
        assert ft.attention(q, q, q).is_inference()
        x = randn(2, 5, 4)
        assert torch.equal(ft.attention(x, x, x), ft.attention(q, q, q))


def test_gradients_of_gradients_are_refused() -> None:
    q = randn(2, 5, 4, requires_grad=True)
    (dq,) = torch.autograd.grad(ft.attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(ft.UnsupportedError, match="differentiated once"):
        dq.sum().backward()


def test_gradients_of_slopes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is computed, and under torch.func too."""
    q, slopes = randn(2, 5, 4), randn(2, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "forward", lambda *args: pytest.fail("it was computed"))
        with pytest.raises(ft.UnsupportedError, match=r"^alibi: "):
            ft.attention(q, q, q, alibi=slopes)
    with pytest.raises(ft.UnsupportedError, match=r"^alibi: "):
        torch.func.grad(lambda x: ft.attention(q, q, q, alibi=x).sum())(slopes.detach())
    with torch.no_grad():
        ft.attention(q, q, q, alibi=slopes)
    ft.attention(q, q, q, alibi=slopes.detach())


FIRST_DUAL = pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own warning, on the first such call


@FIRST_DUAL
def test_forward_mode_is_refused() -> None:
    with forward_ad.dual_level():
        q = forward_ad.make_dual(randn(5, 4), randn(5, 4))
        with pytest.raises(ft.UnsupportedError, match="forward-mode"):
            ft.attention(q, q, q)


def test_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    q = randn(2, 5, 4, requires_grad=True)
    (want,) = torch.autograd.grad(ft.attention(q, q, q, causal=True).sum(), q)
    out = checkpoint(lambda q: ft.attention(q, q, q, causal=True), q, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], want)


def test_there_is_a_backend_to_test() -> None:
    assert "tiles" in BACKENDS


@FIRST_DUAL
def test_forward_mode_is_refused_in_compiled_code() -> None:
    """Tangents would be lost silently there too."""
    x = torch.randn(2, 5, 8)
    compiled = torch.compile(
        lambda x: torch.func.jvp(lambda a: ft.attention(a, a, a), (x,), (x,))[1], backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"exception|forward-mode"):
        compiled(x)


def test_a_window_that_changes_before_the_backward_pass() -> None:
    def gradient(later: list[int]) -> Any:
        x = torch.linspace(-1, 1, 160).reshape(1, 1, 20, 8).requires_grad_()
        window = [2, 1]
        out = ft.attention(x, x.detach(), x.detach(), window=window)
        window[:] = later
        return torch.autograd.grad(out.square().sum(), x)[0]

    assert torch.equal(gradient([2, 1]), gradient([19, 19]))


@pytest.mark.parametrize("window", ["ab", b"ab", bytearray(b"ab")], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_text_is_no_window(grad: bool, window: Any) -> None:
    """Also for a call that autograd records, whose numbers are converted first."""
    x = randn(1, 1, 20, 8, requires_grad=grad)
    with pytest.raises(ft.ShapeError, match=r"^window: expected a pair"):
        ft.attention(x, x, x, window=window)


@pytest.mark.parametrize(
    "options",
    [
        lambda n: {"dropout": 0.5, "seed": n},
        lambda n: {"window": (n, 0)},
        lambda n: {"window": UserList([n, 0])},
        lambda n: {"band": ft.Band(n, 0, 0)},
    ],
    ids=["seed", "window", "UserList", "band"],
)
@pytest.mark.parametrize("number", [torch.tensor(3), np.array(3)], ids=["tensor", "array"])
def test_a_number_that_changes_before_the_backward_pass(number: Any, options: Callable[[Any], Any]) -> None:
    x = torch.linspace(-1, 1, 160).reshape(1, 1, 20, 8).requires_grad_()
    number = deepcopy(number)
    expected = torch.autograd.grad(ft.attention(x, x, x, **options(3)).square().sum(), x)[0]
    out = ft.attention(x, x, x, **options(number))
    number += 1
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], expected)
