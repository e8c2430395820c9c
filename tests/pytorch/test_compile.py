"""torch.compile and torch.export capture flashtile in one graph, with static or dynamic sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch._dynamo.utils import counters
from torch.func import grad, vmap

import flashtile as ft
from flashtile.numerics.dtypes import BFLOAT16
from tests.pytorch.samples import every_backend, randn

CU_Q, CU_K = torch.tensor([0, 3, 9]), torch.tensor([0, 5, 11])

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(function: Callable[..., Any], *calls: tuple[Any, ...], inner: str = "aot_eager", **how: Any) -> int:
    """Check that compiled and eager results, layouts and gradients are equal. Return the number of graphs."""
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend=inner, **how)
    for arguments in calls:
        results, grads = [], []
        for run in (function, compiled):
            own = [x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in arguments]
            result = run(*own)
            results.append(result if isinstance(result, tuple) else (result,))
            if any(x.requires_grad for x in results[-1]):
                sum(x.square().sum() for x in results[-1]).backward()
                grads.append([x.grad for x in own if torch.is_tensor(x) and x.requires_grad])
        torch.testing.assert_close(*results)
        assert [x.stride() for x in results[0]] == [x.stride() for x in results[1]]
        if grads:
            torch.testing.assert_close(*grads)
    return int(counters["stats"]["unique_graphs"])


def qkv(n_q: int, n_k: int, recorded: bool = True, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    shapes = ((2, 4, n_q, 8), (2, 2, n_k, 8), (2, 2, n_k, 6))
    return tuple(randn(*shape, dtype=dtype, requires_grad=recorded) for shape in shapes)


def causal(q: Any, k: Any, v: Any) -> Any:
    return ft.attention(2 * q, k, v, causal=True, return_lse=True)


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_one_graph(recorded: bool) -> None:
    assert same(causal, qkv(9, 11, recorded)) == 1


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_dynamic_sizes(recorded: bool) -> None:
    assert same(causal, qkv(9, 11, recorded), qkv(5, 14, recorded), qkv(12, 7, recorded), dynamic=True) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch itself reads it
def test_compiled_autograd() -> None:
    """It captures the backward pass of an eager call in one graph."""
    inputs = qkv(9, 11)

    def gradients() -> Any:
        return torch.autograd.grad(sum(x.square().sum() for x in causal(*inputs)), inputs)

    expected = gradients()
    counters.clear()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        torch.testing.assert_close(gradients(), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("order", ["grad", "vmap of grad", "grad of vmap"])
def test_torch_func_under_compile(order: str, inner: str) -> None:

    def loss(q: Any, k: Any, v: Any) -> Any:
        return sum(x.square().sum() for x in causal(q, k, v))

    gradients = {
        "grad": grad(loss, (0, 1, 2)),
        "vmap of grad": vmap(grad(loss, (0, 1, 2))),
        "grad of vmap": grad(lambda *x: vmap(loss)(*x).sum(), (0, 1, 2)),
    }[order]
    assert same(lambda *x: gradients(*x), qkv(9, 11, False), inner=inner) == 1


@every_backend
def test_inductor(backend: str) -> None:
    def block(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
        return ft.attention(q.sin(), k, v, bias=bias, sink=sink, causal=True, backend=backend).cos()

    rest = (randn(9, 11, dtype=torch.float32, requires_grad=True), randn(4, dtype=torch.float32, requires_grad=True))
    assert same(block, (*qkv(9, 11), *rest), inner="inductor") == 1


def test_packed() -> None:
    def packed(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return ft.attention_packed(q, k, v, CU_Q, CU_K, bias=bias, causal=True, return_lse=True)

    shapes = ((9, 4, 8), (11, 2, 8), (11, 2, 6), (6, 6))
    assert same(packed, tuple(randn(*shape, requires_grad=True) for shape in shapes), dynamic=True) == 1


def test_changing_numbers() -> None:
    def function(q: Any, left: int, seed: int) -> Any:
        return ft.attention(q, q, q, band=ft.Band(left, 2, 1), dropout=0.5, seed=seed)

    q = randn(2, 9, 8, requires_grad=True)
    # The first numbers are compiled in; once they change, they become symbolic.
    assert same(function, *((q, left, seed) for left, seed in ((1, 5), (2, 6), (3, 7), (0, 2**62)))) <= 3
    assert same(function, (q, 1, 2**64 - 1)) == 1


def test_changing_origin() -> None:
    def function(q: Any, key: int, step: int) -> Any:
        return ft.attention(q, q, q, dropout=0.5, seed=3, origin=ft.Origin(5, key, 1, heads=3, key_step=step))

    q = randn(2, 9, 8, requires_grad=True)
    assert same(function, *((q, *numbers) for numbers in ((0, 1), (6, 2), (5, 3), (8, 1), (9, 4)))) <= 4


def test_all_other_options() -> None:
    def function(q: Any, k: Any, v: Any, mask: Any, alibi: Any, lengths: Any) -> Any:
        return ft.attention(
            q,
            k,
            v,
            mask=mask,
            alibi=alibi,
            kv_lengths=lengths,
            window=(5, None),
            softcap=3.0,
            scale=0.3,
            out_dtype=torch.float32,
            threads=1,
            deterministic=True,
        )

    rest = (torch.ones(9, 11, dtype=torch.bool).tril(2), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([4, 11]))
    assert same(function, (*qkv(9, 11, dtype=torch.bfloat16), *rest)) == 1


def test_merge() -> None:
    def halves(q: Any, k: Any, v: Any) -> Any:
        parts = (ft.attention(q, k[:, :, half], v[:, :, half], return_lse=True) for half in (slice(5), slice(5, None)))
        (out_a, lse_a), (out_b, lse_b) = parts
        return ft.merge(out_a, lse_a, out_b, lse_b)

    assert same(halves, qkv(9, 11)) == 1


def test_autocast() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return ft.attention(q, k, v)

    assert same(function, qkv(9, 11)) == 1


def test_a_wrong_call_is_an_error_at_compile_time() -> None:
    q, k, v = qkv(9, 11, False)
    with pytest.raises(Exception, match="k: expected head dim 7 like q, got 8"):
        torch.compile(causal, fullgraph=True, backend="aot_eager")(q[..., :7], k, v)


WRONG = {
    "causal": {"causal": 1},
    "deterministic": {"deterministic": 1},
    "seed": {"seed": -1},
    "large seed": {"seed": 2**64},
    "scale": {"scale": True},
    "large scale": {"scale": 10**400},
    "softcap": {"softcap": True},
    "dropout": {"dropout": 1},
    "window": {"window": (True, 2)},
    "window without a pair": {"window": 5},
    "band beside a window": {"band": ft.Band(), "window": (1, 2)},
    "threads": {"threads": True},
}


@pytest.mark.parametrize("name", WRONG)
def test_compiled_calls_refuse_what_eager_calls_refuse(name: str) -> None:
    """With the same message: with fullgraph, torch.compile quotes the error."""
    q = qkv(9, 11, False)[0]

    def function(q: Any) -> Any:
        return ft.attention(q, q, q, **WRONG[name])

    with pytest.raises(ft.FlashtileError) as eager:
        function(q)
    with pytest.raises(ft.FlashtileError, match=re.escape(str(eager.value))):
        torch.compile(function, backend="aot_eager")(q)
    with pytest.raises(Exception, match=re.escape(str(eager.value))):
        torch.compile(function, backend="aot_eager", fullgraph=True)(q)


HALF, THREE = np.float32(0.5), np.int64(3)
NUMPY: dict[str, Callable[[], dict[str, Any]]] = {
    "scale": lambda: {"scale": 1 / np.sqrt(8)},
    "softcap": lambda: {"softcap": np.float64(2.0)},
    "window": lambda: {"window": (np.int64(3), np.int32(1))},
    "seed": lambda: {"dropout": np.float64(0.5), "seed": np.int64(3)},
    "threads": lambda: {"threads": np.int64(1)},
}
NUMPY_GLOBALS: dict[str, Callable[[], dict[str, Any]]] = {
    "scale": lambda: {"scale": HALF},
    "window": lambda: {"window": (THREE, None)},
    "band": lambda: {"band": ft.Band(THREE, THREE, 0)},
    "seed": lambda: {"dropout": HALF, "seed": THREE},
    "origin": lambda: {"dropout": HALF, "origin": ft.Origin(THREE, THREE)},
    "threads": lambda: {"threads": THREE},
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_numbers(name: str) -> None:
    if torch.__version__ < (2, 9) and name in ("window", "seed", "threads"):
        pytest.skip("torch 2.8 breaks the graph at a NumPy integer")
    assert same(lambda q: ft.attention(q, q, q, **NUMPY[name]()), qkv(9, 11)[:1]) == 1


@pytest.mark.parametrize("name", NUMPY_GLOBALS)
def test_numpy_numbers_in_globals(name: str) -> None:
    """torch.compile does not know their values, so the graph breaks."""

    def function(q: Any) -> Any:
        return ft.attention(q, q, q, **NUMPY_GLOBALS[name]())

    q = qkv(9, 11, False)[0]
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(q), function(q))


OUT_DTYPES = [torch.float32, "float32", np.float32, np.dtype("float32"), BFLOAT16]


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_every_form_of_out_dtype(out_dtype: Any) -> None:
    def function(q: Any) -> Any:
        return ft.attention(q, q, q, out_dtype=out_dtype)

    assert same(function, (randn(2, 9, 8, dtype=torch.bfloat16, requires_grad=True),)) == 1


def test_an_invalid_out_dtype() -> None:
    def function(q: Any) -> Any:
        return ft.attention(q, q, q, out_dtype="torch.float32")

    q = randn(2, 9, 8, dtype=torch.bfloat16)
    for run in (function, torch.compile(function, backend="aot_eager")):
        with pytest.raises(Exception, match=r"out_dtype: expected bfloat16 or float32 .* got torch.float32"):
            run(q)


LENGTH_DEPENDENT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "window": lambda q: {"window": (q.shape[2] // 2, 2)},
    "band": lambda q: {"band": ft.Band(q.shape[2] // 2, 2, 0)},
}


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_export_of_options_that_depend_on_a_length(name: str, strict: bool) -> None:
    """The length is dynamic: such options are checked when it is known."""

    class Module(torch.nn.Module):
        def forward(self, q: Any) -> Any:
            return ft.attention(q, q, q, **LENGTH_DEPENDENT[name](q))

    module, shapes = Module(), ({2: torch.export.Dim("n")},)
    exported = torch.export.export(module, qkv(9, 11, False)[:1], dynamic_shapes=shapes, strict=strict)
    for n in (9, 20):
        (q,) = qkv(n, 11, False)[:1]
        torch.testing.assert_close(exported.module()(q), module(q))


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_export(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return causal(q, k, v)

    n_q, n_k = (torch.export.Dim(name, min=2, max=4096) for name in ("n_q", "n_k"))
    exported = torch.export.export(
        Module(), qkv(9, 11, False), dynamic_shapes=({2: n_q}, {2: n_k}, {2: n_k}), strict=strict
    )
    assert "flashtile.attention" in exported.graph_module.code
    for lengths in ((9, 11), (4, 30)):
        torch.testing.assert_close(exported.module()(*qkv(*lengths, False)), causal(*qkv(*lengths, False)))
