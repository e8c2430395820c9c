"""The operators meet the requirements of torch.library: schema, fakes, autograd."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile as ft
from flashtile import inputs
from flashtile.numerics.dtypes import FLOATS
from flashtile.pytorch import operands, operators, run
from tests.pytorch.samples import every_backend, randn

CU_Q, CU_K = torch.tensor([0, 3, 9]), torch.tensor([0, 5, 11], dtype=torch.int32)


def some(dtype: torch.dtype = torch.float64, grad: bool = True, **options: Any) -> operands.Operands:
    q, k, v = (randn(*shape, dtype=dtype, requires_grad=grad) for shape in ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6)))
    return operands.operands(q, k, v, options.pop("backend", "auto"), options)


CALLS = {
    "plain": lambda: some(),
    "causal": lambda: some(causal=True),
    "band": lambda: some(band=ft.Band(3, 2, 1)),
    "bias and sink": lambda: some(bias=randn(4, 9, 1, requires_grad=True), sink=randn(4, requires_grad=True)),
    "other options": lambda: some(
        mask=torch.ones(9, 11, dtype=torch.bool).tril(),
        alibi=randn(2, 4).abs(),
        kv_lengths=torch.tensor([3, 11]),
        softcap=2.0,
        scale=0.3,
        dropout=0.2,
        seed=2**64 - 1,
        threads=1,
        deterministic=True,
    ),
    "an origin": lambda: some(dropout=0.2, origin=ft.Origin(3, 5, key_step=2)),
    "a seed in a tensor": lambda: some(dropout=0.2, seed=torch.tensor(-5)),
    "no gradients": lambda: some(grad=False),
    "packed": lambda: operands.operands(
        *(randn(*shape, requires_grad=True) for shape in ((9, 4, 8), (11, 2, 8), (11, 2, 6))),
        "auto",
        {"cu_q": CU_Q, "cu_k": CU_K, "bias": randn(2, 1, 6, 6, requires_grad=True)},
    ),
    "window": lambda: some(window=(None, 3)),
    **{
        dtype: lambda dtype=dtype: some(getattr(torch, dtype), out_dtype="float64" if dtype == "float64" else "float32")
        for dtype in FLOATS
    },
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, in torch 2.15
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(operators.ATTENTION, CALLS[name]())


@every_backend
def test_opcheck_of_the_backward_operator(backend: str) -> None:
    given = some(grad=False, bias=randn(9, 11), sink=randn(4), backend=backend)
    out, lse = operators.ATTENTION(*given)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for bias_grad, dlse in ((True, None), (False, torch.ones_like(lse))):
        arguments = (torch.ones_like(out), dlse, out, lse, bias_grad, *given)
        torch.library.opcheck(operators.ATTENTION_BACKWARD, arguments, test_utils=checks)


def test_the_schema_has_the_arguments_of_a_call() -> None:
    assert tuple(argument.name for argument in operators.ATTENTION._schema.arguments) == operands.Operands._fields
    tensors = re.findall(r"Tensor\??\s(\w+)", operands.SCHEMA)
    assert tuple(tensors) == operands.Operands._fields[: len(tensors)] == operands.TENSOR_ARGUMENTS
    assert {*tensors} - {"seed_tensor"} == set(inputs.TENSORS)


def test_operands_convert_back_to_options() -> None:
    for options in (
        {"causal": True, "window": (3, None), "seed": 2**64 - 1, "softcap": 2.0, "dropout": 0.5, "threads": 2},
        {"dropout": 0.5, "origin": ft.Origin(1, 2, 3, 4, 9, 5, 6)},
        {"origin": ft.Origin(1, 2, 3, 4, None, 5, 6)},
        {"band": ft.Band(1, 2, -3), "seed": 2**63, "out_dtype": torch.float32, "scale": 0.1, "deterministic": True},
    ):
        q = randn(3, 4)
        back = operands.operands(q, q, q, "tiles", options).options()
        assert back == options | ({"out_dtype": "float32"} if "out_dtype" in options else {})
        assert list(back) == [name for name in signature(ft.attention).parameters if name in options]
    assert operands.operands(q, q, q, "tiles", {}).options() == {}


@pytest.mark.parametrize("where", ["meta", "fake", "fake cuda"])
def test_meta_and_fake_tensors(where: str) -> None:
    device = {"meta": "meta", "fake": "cpu", "fake cuda": "cuda"}[where]

    def check() -> None:
        q, k, v = (
            torch.empty(s, device=device, dtype=torch.bfloat16, requires_grad=device != "cuda")
            for s in ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6))
        )
        out, lse = ft.attention(q, k, v, causal=True, return_lse=True)
        assert out.shape == (2, 4, 9, 6) and out.dtype == torch.bfloat16 and out.device.type == device
        assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32
        with pytest.raises(ft.ShapeError, match=r"^k: "):
            ft.attention(q, v, v)
        if out.requires_grad:  # torch's autograd needs a driver even for a fake GPU
            out.sum().backward()
            assert k.grad.shape == k.shape

    if where == "meta":
        check()
    else:
        with FakeTensorMode():
            check()


class OperatorRecorder(TorchDispatchMode):
    """Records the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operators() -> None:
    q = randn(3, 4, requires_grad=True)
    with OperatorRecorder() as recorder:
        ft.attention(q, q, q).sum().backward()
        ft.attention(q.detach(), q.detach(), q.detach())
    assert [name for name in recorder.seen if "flashtile" in name] == [
        "flashtile::attention",
        "flashtile::attention_backward",
        "flashtile::attention",
    ]


def test_subclasses_see_the_function() -> None:
    class Named(torch.Tensor):
        pass

    q = randn(3, 4)
    assert type(ft.attention(q.as_subclass(Named), q, q)) is Named
    assert type(ft.attention(torch.nn.Parameter(q), q, q)) is torch.Tensor


def test_an_unsupported_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile import dispatch

    q = randn(3, 4, requires_grad=True)
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda problem, backend, device, **_: choose(problem, backend, "toaster"))
    for x in (q, q.detach()):
        with pytest.raises(ft.UnsupportedError, match="toaster"):
            ft.attention(x, x, x)
    with pytest.raises(ft.UnsupportedError, match=r"tiles .*toaster"):
        ft.attention(q, q, q, backend="tiles")


@pytest.mark.parametrize("enabled", [False, True])
def test_deterministic_algorithms_set_the_option(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        run, "forward", lambda q, k, v, backend, options, _: [seen.append(options.get("deterministic", False))]
    )
    x = torch.zeros(2, 3, 4)
    torch.use_deterministic_algorithms(enabled)
    try:
        ft.attention(x, x, x)
        ft.attention(x, x, x, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [enabled, True]
