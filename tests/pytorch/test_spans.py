"""Spans of tensors: gradients, torch.compile, export and vmap, against the dense mask."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from flashtile import masks
from flashtile.problem import describe
from flashtile.pytorch.operands import operands
from flashtile.pytorch.operators import ATTENTION
from tests.pytorch.samples import every_backend, randn

N = 33
IDS = torch.tensor([0] * 10 + [1] * 23)
SPANS = masks.documents(IDS)


def qkv(requires_grad: bool = False) -> list[Tensor]:
    return [randn(2, h, N, 16 + n, requires_grad=requires_grad) for n, h in ((0, 4), (0, 2), (1, 2))]


def by_mask(*tensors: Tensor, spans: ft.Spans = SPANS, **options: Any) -> Any:
    return ft.attention(*tensors, mask=spans.to_mask(N), **options)


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


@every_backend
def test_gradients(backend: str) -> None:
    tensors = qkv(True)
    wanted = torch.autograd.grad(by_mask(*tensors).square().sum(), tensors)
    for _ in range(2):  # uncached, then cached
        out = ft.attention(*tensors, spans=SPANS, backend=backend)
        same(torch.autograd.grad(out.square().sum(), tensors), wanted)


def test_gradcheck() -> None:
    tensors = [randn(1, 2, 7, 4, requires_grad=True) for _ in range(3)]
    spans = masks.sink_window(2, 1, 7, device="cpu")
    torch.autograd.gradcheck(lambda *x: ft.attention(*x, spans=spans), tensors)


def documents_inside(q: Tensor, k: Tensor, v: Tensor, spans: ft.Spans) -> Any:
    return ft.attention(q, k, v, spans=masks.documents(IDS))


def spans_inside(q: Tensor, k: Tensor, v: Tensor, spans: ft.Spans) -> Any:
    return ft.attention(q, k, v, spans=ft.Spans(spans.begin[..., 0], spans.end[..., 0]))


def prefix_and_documents(q: Tensor, k: Tensor, v: Tensor, spans: ft.Spans) -> Any:
    """The documents, and what adds nothing to them."""
    n = q.shape[2]
    beyond = masks.sink_window(n // 2, 0, n, device=q.device) & ft.Spans(IDS * 0 + n, n)
    return ft.attention(q, k, v, spans=masks.documents(IDS) & masks.prefix_lm(n, n, device=q.device) | beyond)


def as_given(q: Tensor, k: Tensor, v: Tensor, spans: ft.Spans) -> Any:
    return ft.attention(q, k, v, spans=spans)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, when its compiler is imported
@pytest.mark.parametrize("function", [as_given, spans_inside, documents_inside, prefix_and_documents])
def test_compiled(function: Callable[..., Any]) -> None:
    tensors = qkv(True)
    wanted = torch.autograd.grad(by_mask(*tensors).sum(), tensors)
    dynamic = function is prefix_and_documents  # sizes are symbols
    out = torch.compile(function, fullgraph=True, dynamic=dynamic)(*tensors, SPANS)
    same(out, by_mask(*tensors))
    same(torch.autograd.grad(out.sum(), tensors), wanted)


@pytest.mark.parametrize("function", [as_given, spans_inside])
def test_exported(function: Callable[..., Any]) -> None:
    class Model(torch.nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return function(*inputs)

    tensors = qkv()
    program = torch.export.export(Model(), (*tensors, SPANS)).module()
    other = masks.documents(torch.tensor([0] * 20 + [1] * 13))
    same(program(*tensors, other), by_mask(*tensors, spans=other))


def test_vmap() -> None:
    """Spans that examples share, and spans of each."""
    tensors = qkv()
    same(torch.func.vmap(lambda *x: as_given(*x, SPANS))(*tensors), by_mask(*tensors))
    ends = torch.stack([torch.arange(N) + 1, torch.full((N,), 20)])
    wanted = by_mask(*tensors, spans=ft.Spans(0, ends[:, None]))
    same(torch.func.vmap(lambda *x: ft.attention(*x[:3], spans=ft.Spans(0, x[3])))(*tensors, ends), wanted)
    spans = ft.Spans.of(ft.Spans(0, ends[:, None]).limits[:, None])
    same(torch.func.vmap(as_given)(*tensors, spans), wanted)
    found = torch.func.vmap(lambda end: (ft.Spans(0, end) & SPANS | ft.Spans(end, N)).limits)(ends)
    for end, limits in zip(ends, found, strict=True):
        exact = ft.Spans(0, end).to_mask(N) & SPANS.to_mask(N) | ft.Spans(end, N).to_mask(N)
        assert torch.equal(ft.Spans.of(limits).to_mask(N), exact)


def test_operator() -> None:
    torch.library.opcheck(ATTENTION, tuple(operands(*qkv(True), "auto", {"spans": SPANS.limits})))


def test_packed_sequences_count_their_own_queries_and_keys() -> None:
    x, starts = randn(N, 4, 16), torch.tensor([0, 10, N])
    spans = ft.Spans(0, torch.arange(23) + 1)
    same(
        ft.attention_packed(x, x, x, starts, starts, spans=spans),
        ft.attention_packed(x, x, x, starts, starts, causal=True),
    )


def test_more_limits_than_packed_queries() -> None:
    """Lengths on a device are unknown, but no sequence has more queries than all of them."""
    x, starts = (torch.empty(n, device="meta") for n in ((N, 4, 16), (3,)))
    spans = ft.Spans(0, torch.zeros(N + 1, dtype=torch.int32, device="meta"))
    with pytest.raises(ft.ShapeError, match=rf"spans: expected 1 or {N} along queries, got {N + 1}"):
        describe(x, x, x, cu_q=starts.int(), cu_k=starts.int(), spans=spans)


def test_rows_first() -> None:
    tensors = [x.transpose(1, 2) for x in qkv()]
    same(ft.attention(*tensors, layout="bnhd", spans=SPANS).transpose(1, 2), by_mask(*qkv()))


def test_copies() -> None:
    for found in (copy.deepcopy(SPANS), pickle.loads(pickle.dumps(SPANS))):
        assert torch.equal(found.limits, SPANS.limits)


def test_spans_of_another_library_or_device() -> None:
    tensors = qkv()
    with pytest.raises(ft.DTypeError, match=r"spans: expected a torch tensor like q"):
        ft.attention(*tensors, spans=masks.documents(IDS.numpy()))
    with pytest.raises(ft.DTypeError, match=r"spans: expected a NumPy array like q"):
        ft.attention(*(x.numpy() for x in tensors), spans=SPANS)
    with pytest.raises(ft.DTypeError, match=r"spans: expected a tensor on cpu like q, got one on meta"):
        ft.attention(*tensors, spans=ft.Spans(torch.zeros(N, dtype=torch.int32, device="meta"), N))
    with pytest.raises(ft.DTypeError, match=r"spans: expected begin and end on one device"):
        ft.Spans(torch.zeros(N, dtype=torch.int32, device="meta"), torch.zeros(N, dtype=torch.int32))
    with pytest.raises(ft.DTypeError, match=r"spans: expected begin and end of one library"):
        ft.Spans(torch.zeros(N, dtype=torch.int32), np.zeros(N, np.int32))
    with pytest.raises(ft.ShapeError, match=r"spans: expected disjoint spans"):
        ft.Spans(torch.zeros((1, 1, N, 2), dtype=torch.int32), 3)


def test_spans_that_change() -> None:
    """The values are read at each call; those of the forward pass count in the backward pass, or an error says so."""
    tensors = qkv(True)
    spans = masks.documents(IDS)
    out = ft.attention(*tensors, spans=spans)
    spans.limits.zero_()
    assert not ft.attention(*tensors, spans=spans).any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
