"""layout= and key_padding_mask= on tensors: gradients, repeated calls, torch.compile, torch.export, vmap."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.testing import assert_close

import flashtile as ft

B, H, KV, NQ, NK, D = 2, 4, 2, 5, 7, 8
PADDING = torch.tensor([[True] * 4 + [False] * 3, [False] * 2 + [True] * 5])


def tensors(dtype: torch.dtype = torch.float64, grad: bool = False) -> list[torch.Tensor]:
    """Return q, k and v as (batch, length, heads, dim)."""
    fixed = torch.Generator().manual_seed(0)
    shapes = (B, NQ, H, D), (B, NK, KV, D), (B, NK, KV, D)
    return [torch.randn(s, generator=fixed, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


def rows_first(q: Any, k: Any, v: Any, padding: Any, **options: Any) -> Any:
    return ft.attention(q, k, v, layout="bnhd", key_padding_mask=padding, **options)


def by_hand(q: Any, k: Any, v: Any, padding: Any, **options: Any) -> Any:
    out = ft.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=padding[:, None, None], **options)
    return out.transpose(1, 2)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": torch.rand(B, 1, NQ, NK) > 0.3}], ids=",".join)
def test_combined_with_other_options(options: dict[str, Any]) -> None:
    given = tensors(grad=True)
    hand = options | {"mask": options.get("mask", torch.tensor(True)) & PADDING[:, None, None]}
    want = ft.attention(*(x.transpose(1, 2) for x in given), **hand).transpose(1, 2)
    found, lse = rows_first(*given, PADDING, return_lse=True, **options)
    assert found.is_contiguous() and lse.shape == (B, NQ, H) and lse.is_contiguous()
    assert_close(found, want, rtol=0, atol=0)
    grads = torch.autograd.grad((found * found).sum() + lse.sum(), given)
    assert not grads[1][~PADDING].any() and grads[1][PADDING].any()


def test_gradients_equal_those_of_the_other_layout() -> None:
    given = tensors(grad=True)
    weight = torch.linspace(-1, 1, B * NQ * H * D, dtype=torch.float64).reshape(B, NQ, H, D)
    grads = [torch.autograd.grad((f(*given, PADDING) * weight).sum(), given) for f in (rows_first, by_hand)]
    assert_close(*grads, rtol=0, atol=0)


def test_repeated_calls() -> None:
    """The options of a call matter, whatever was called before with the same tensors."""
    square = [torch.randn(2, 4, 4, 8) for _ in range(3)]  # valid in both layouts
    every = torch.ones(2, 4, dtype=torch.bool)
    some = torch.tensor([[True, True, False, False], [False, True, True, True]])
    transposed = [x.transpose(1, 2).contiguous() for x in square]
    want = ft.attention(*transposed).transpose(1, 2)
    hidden = ft.attention(*square, mask=some[:, None, None])
    for _ in range(3):
        assert_close(ft.attention(*square, layout="bnhd"), want)
        assert_close(ft.attention(*square, layout="bhnd"), ft.attention(*square))
        assert_close(ft.attention(*square, key_padding_mask=every), ft.attention(*square))
        assert_close(ft.attention(*square, key_padding_mask=some), hidden)
        assert not torch.equal(ft.attention(*square), want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    given = tensors(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(rows_first, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_close(compiled(*given, PADDING, causal=True), rows_first(*given, PADDING, causal=True))


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, padding: Any) -> Any:
            return rows_first(q, k, v, padding)

    given = tensors(torch.float32)
    program = torch.export.export(Layer(), (*given, PADDING), strict=False)
    assert_close(program.module()(*given, PADDING), rows_first(*given, PADDING))


def test_vmap() -> None:
    given = [torch.stack([x, x.flip(1), -x]) for x in tensors()]
    seen = torch.stack([PADDING, ~PADDING, PADDING])
    found = torch.func.vmap(rows_first)(*given, seen)
    assert_close(found, torch.stack([rows_first(*x) for x in zip(*given, seen, strict=True)]))


def test_lists_of_lengths() -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors())
    want = ft.attention(q, k, v, kv_lengths=torch.tensor([3, 7]))
    for _ in range(2):
        assert_close(ft.attention(q, k, v, kv_lengths=[3, 7]), want, rtol=0, atol=0)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: ft.attention(*x, kv_lengths=[3, 7]), fullgraph=True, backend="aot_eager")
    assert_close(compiled(q, k, v), want)
    x = torch.randn(9, 2, 4)
    starts = torch.tensor([0, 4, 9])
    assert_close(ft.attention_packed(x, x, x, [0, 4, 9], (0, 4, 9)), ft.attention_packed(x, x, x, starts, starts))


@pytest.mark.parametrize("wrong", [torch.float32, torch.strided, torch.Size([2, 3]), torch.device("cpu"), torch])
def test_torch_objects_that_are_no_tensors(wrong: Any) -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ft.DTypeError, match=r"^q: expected a NumPy array or a torch tensor"):
        ft.attention(wrong, x, x)
    with pytest.raises(ft.DTypeError, match=r"^v: expected a torch tensor like q"):
        ft.attention(x, x, wrong)
    with pytest.raises(ft.DTypeError, match=r"^k: expected a torch tensor like q"):
        ft.attention(x, memoryview(x.numpy()), x)
    with pytest.raises(ft.DTypeError, match=r"^mask: expected a torch tensor like q"):
        ft.attention(x, x, x, mask=wrong)
