"""Wrong calls of tensors are refused by the name of the argument, with gradients and without."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from flashtile.numerics.dtypes import name_of
from tests.pytorch.samples import randn

CU_Q = torch.tensor([0, 3, 9])


WRONG = {
    "shape": (ft.ShapeError, "k", {"k": randn(2, 2, 11, 7)}),
    "dtype": (ft.DTypeError, "v", {"v": randn(2, 2, 11, 8, dtype=torch.float32)}),
    "integers": (ft.DTypeError, "q", {"q": torch.ones(2, 4, 9, 8, dtype=torch.int64)}),
    "mask": (ft.DTypeError, "mask", {"mask": randn(9, 11)}),
    "bias": (ft.ShapeError, "bias", {"bias": randn(8, 11)}),
    "bias dtype": (ft.DTypeError, "bias", {"bias": randn(9, 11, dtype=torch.float16)}),
    "sink": (ft.ShapeError, "sink", {"sink": randn(2)}),
    "alibi": (ft.ShapeError, "alibi", {"alibi": randn(3)}),
    "kv_lengths": (ft.ShapeError, "kv_lengths", {"kv_lengths": torch.tensor([1, 12])}),
    "softcap": (ft.DTypeError, "softcap", {"softcap": "much"}),
    "scale": (ft.DTypeError, "scale", {"scale": torch.tensor(2.0, requires_grad=True)}),
    "scale of NaN": (ft.ShapeError, "scale", {"scale": float("nan")}),
    "dropout": (ft.ShapeError, "dropout", {"dropout": 1.0}),
    "seed": (ft.ShapeError, "seed", {"seed": -1}),
    "large seed": (ft.ShapeError, "seed", {"seed": 2**64}),
    "seed of 32 bits": (ft.DTypeError, "seed", {"seed": torch.tensor(1, dtype=torch.int32)}),
    "fraction as seed": (ft.DTypeError, "seed", {"seed": torch.tensor(1.0)}),
    "two seeds": (ft.ShapeError, "seed", {"seed": torch.tensor([1, 2])}),
    "empty seed": (ft.ShapeError, "seed", {"seed": torch.zeros(0, dtype=torch.int64)}),
    "seed on another device": (ft.DTypeError, "seed", {"seed": torch.zeros((), dtype=torch.int64, device="meta")}),
    "causal": (ft.DTypeError, "causal", {"causal": 1}),
    "window": (ft.ShapeError, "window", {"window": (1, 2, 3)}),
    "window below 0": (ft.ShapeError, "window", {"window": (-1, 2)}),
    "band": (ft.DTypeError, "band", {"band": (1, 2, 3)}),
    "band beside causal": (ft.ShapeError, "band", {"band": ft.Band(), "causal": True}),
    "out_dtype": (ft.DTypeError, "out_dtype", {"out_dtype": torch.int8}),
    "threads": (ft.DTypeError, "threads", {"threads": 1.5}),
    "deterministic": (ft.DTypeError, "deterministic", {"deterministic": "yes"}),
    "backend": (ft.UnsupportedError, "backend", {"backend": "abacus"}),
    "backend that is a number": (ft.UnsupportedError, "backend", {"backend": 3}),
    "NumPy among tensors": (ft.DTypeError, "bias", {"bias": randn(9, 11).numpy()}),
    "two devices": (ft.DTypeError, "k", {"k": torch.empty(2, 2, 11, 8, device="meta")}),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str, grad: bool) -> None:
    error, argument, wrong = WRONG[name]
    right = {"q": randn(2, 4, 9, 8, requires_grad=grad), "k": randn(2, 2, 11, 8), "v": randn(2, 2, 11, 6)}
    with pytest.raises(error, match=f"^{argument}: "):
        ft.attention(**(right | wrong))


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.complex32], ids=str)
@pytest.mark.parametrize("argument", ["q", "k", "v", "mask", "bias", "alibi", "sink", "kv_lengths", "cu_k"])
def test_dtypes_unknown_to_numpy(argument: str, dtype: torch.dtype) -> None:
    q = torch.zeros(9, 2, 4)
    right = {"q": q, "k": q, "v": q, "cu_q": CU_Q, "cu_k": CU_Q}
    for x in (q, q.clone().requires_grad_()):
        given = right | {"q": x, argument: torch.zeros(2).to(dtype)}
        with pytest.raises(ft.DTypeError, match=f"^{argument}: .* got {name_of(dtype)}"):
            ft.attention_packed(**given)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=layout)


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested).*:UserWarning")
@pytest.mark.parametrize("argument", ["q", "k", "v", "mask", "bias", "sink"])
@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.ones(2, 3).to_sparse(),
        lambda: torch.ones(2, 3).to_sparse_csr(),
        lambda: nested(torch.strided),
        lambda: nested(torch.jagged),
    ],
    ids=["sparse", "rows", "nested", "jagged"],
)
def test_tensors_that_are_not_dense(other: Any, argument: str) -> None:
    q = randn(2, 3, 4, dtype=torch.float32)
    with pytest.raises(ft.DTypeError, match=f"^{argument}: expected a dense tensor, got "):
        ft.attention(**({"q": q, "k": q, "v": q} | {argument: other()}))
    lse = q.sum(-1)
    with pytest.raises(ft.DTypeError, match=r"^lse_b: expected a dense tensor, got "):
        ft.merge(q, lse, q, other())


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("cu", [[0, 3, 8], [0, 5, 3, 9], [1, 9]])
def test_wrong_starts(cu: list[int], grad: bool) -> None:
    q = randn(9, 2, 4, requires_grad=grad)
    with pytest.raises(ft.ShapeError, match=r"^cu_q: "):
        ft.attention_packed(q, q, q, torch.tensor(cu), torch.tensor(cu))
    with pytest.raises(ft.ShapeError, match=r"^bias: "):
        ft.attention_packed(q, q, q, CU_Q, CU_Q, bias=randn(5, 6))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_without_a_sequence(device: str) -> None:
    """Shapes alone show this."""
    q, starts = torch.zeros(9, 2, 4, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ft.ShapeError, match=r"^cu_q: .* got one entry"):
        ft.attention_packed(q, q, q, starts, starts)
    assert ft.attention_packed(q[:0], q[:0], q[:0], starts, starts).shape == (0, 2, 4)
