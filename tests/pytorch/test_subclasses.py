"""Tensors that do not hold their values plainly are refused by name in every function; other subclasses work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close

import flashtile as ft
from flashtile.compat.flash_attn import flash_attn_func
from flashtile.compat.sdpa import scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings(  # torch's own, for prototype features
    "ignore:The PyTorch API of", "ignore:Sparse CSR tensor support"
)


def plain() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def masked() -> Tensor:
    return torch.masked.masked_tensor(plain(), torch.ones(2, 3, 8, 8, dtype=torch.bool))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "upper left": (lambda: causal_upper_left(8, 8), "a CausalBias, which has no values"),
    "lower right": (lambda: causal_lower_right(8, 8), "a CausalBias, which has no values"),
    "nested": (lambda: torch.nested.nested_tensor(list(plain())), "a nested one"),
    "jagged": (
        lambda: torch.nested.nested_tensor(list(plain()), layout=torch.jagged),
        "a nested one; ",
    ),
    "sparse": (lambda: plain().to_sparse(), "torch.sparse_coo"),
    "sparse rows": (lambda: plain()[0, 0].to_sparse_csr(), "torch.sparse_csr"),
    "mkldnn": (lambda: plain().to_mkldnn(), "torch._mkldnn"),
    "masked": (masked, "a MaskedTensor, whose mask would be ignored"),
}
every_kind = pytest.mark.parametrize("kind", REFUSED)


@every_kind
def test_refused_by_name(kind: str) -> None:
    make, words = REFUSED[kind]
    x, other = plain(), make()
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("q", lambda y: ft.attention(y, y, y)),
        ("k", lambda y: ft.attention(x, y, x)),
        ("v", lambda y: ft.attention(x, x, y)),
        ("bias", lambda y: ft.attention(x, x, x, bias=y)),
        ("q", lambda y: ft.attention_packed(y, y, y, torch.tensor([0, 2]), torch.tensor([0, 2]))),
        ("out_a", lambda y: ft.merge(y, x[..., 0], x, x[..., 0])),
        ("lse_b", lambda y: ft.merge(x, x[..., 0], x, y)),
    ]
    for argument, call in calls:
        with pytest.raises(ft.DTypeError, match=rf"^{argument}: expected a .* tensor, got {words}"):
            call(other)


def test_refused_after_the_same_call_with_plain_tensors() -> None:
    x = plain()
    for _ in range(3):
        ft.attention(x, x, x, bias=torch.zeros(8, 8))
        with pytest.raises(ft.DTypeError, match=r"^bias: expected a plain tensor, got a CausalBias"):
            ft.attention(x, x, x, bias=causal_upper_left(8, 8))


@every_kind
def test_refused_as_a_mask_of_sdpa(kind: str) -> None:
    make, words = REFUSED[kind]
    x = plain()
    if "CausalBias" in words:
        assert_close(scaled_dot_product_attention(x, x, x, make()), ft.attention(x, x, x, causal=True))
        return
    with pytest.raises(ft.DTypeError, match=rf"^attn_mask: expected a .* tensor, got {words.partition(';')[0]}"):
        scaled_dot_product_attention(x, x, x, make())


@every_kind
def test_refused_by_flash_attn(kind: str) -> None:
    make, _ = REFUSED[kind]
    with pytest.raises(RuntimeError, match=r"^q: expected") as caught:
        flash_attn_func(*[make()] * 3)
    assert isinstance(caught.value, ft.FlashtileError)


class Plain(Tensor):
    """A subclass that holds values like any tensor."""


class WithoutTorchFunction(Tensor):
    """The same, with __torch_function__ disabled."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def awaited() -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(plain())


WORKING: dict[str, Callable[[], Tensor]] = {
    "subclass": lambda: plain().as_subclass(Plain),
    "without __torch_function__": lambda: plain().as_subclass(WithoutTorchFunction),
    "parameter": lambda: torch.nn.Parameter(plain()),
    "negated": lambda: torch.complex(-plain(), -plain()).conj().imag,
    "zero": lambda: torch._efficientzerotensor((2, 3, 8, 8)),
    "functional": lambda: torch._to_functional_tensor(plain()),
    "awaited": awaited,
}


@pytest.mark.parametrize("kind", WORKING)
def test_other_subclasses_work(kind: str) -> None:
    x, other = plain(), WORKING[kind]()
    value = torch.zeros_like(x) if kind == "zero" else x
    for _ in range(2):
        for found, want in (
            (ft.attention(other, other, other), ft.attention(value, value, value)),
            (ft.attention(x, x, other), ft.attention(x, x, value)),
            (ft.attention(x, x, x, bias=other), ft.attention(x, x, x, bias=value)),
            (scaled_dot_product_attention(x, x, other), ft.attention(x, x, value)),
        ):
            found = torch._from_functional_tensor(found) if torch._is_functional_tensor(found) else found
            assert_close(found.detach().as_subclass(Tensor), want)
