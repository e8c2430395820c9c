"""What torch builds on calls, on a GPU: compiled graphs, autocast, operator checks, vmap, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.func import grad, vmap

import flashtile as ft
from flashtile.pytorch import operands, operators
from tests.gpu.placement import same_bits
from tests.pytorch.samples import randn

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

LENGTHS = [64, 37]
CU = [0, 17, 17, 65]


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False) -> Tensor:
    return randn(*shape).to("cuda", dtype).requires_grad_(requires_grad)


def qkv(n_q: int = 65, n_k: int = 129, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (cuda(2, h, n, 64, dtype=dtype, requires_grad=True) for h, n in ((4, n_q), (2, n_k), (2, n_k)))
    return q, k, v


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(function: Callable[..., Any], *calls: tuple[Any, ...], inner: str = "aot_eager", **how: Any) -> int:
    """Check that compiled and plain give the same results and gradients, without a graph break.

    Return the number of graphs.
    """
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend=inner, **how)
    for arguments in calls:
        outcomes = []
        for run in (function, compiled):
            own = [x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in arguments]
            result = run(*own)
            results = result if isinstance(result, tuple) else (result,)
            leaves = [x for x in own if torch.is_tensor(x) and x.requires_grad]
            outcomes.append([*results, *torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])])
        for x, y in zip(*outcomes, strict=True):
            assert x.stride() == y.stride()
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


def causal(q: Any, k: Any, v: Any) -> Any:
    return ft.attention(2 * q, k, v, causal=True, return_lse=True)


def test_compiled() -> None:
    assert same(causal, qkv()) == 1


def test_compiled_for_sizes_unknown() -> None:
    assert same(causal, qkv(), qkv(33, 131), qkv(131, 33), qkv(1001, 999), dynamic=True) == 1


def test_compiled_for_sizes_that_change() -> None:
    """The first size is compiled as a constant; the second makes it dynamic."""
    assert same(causal, qkv(), qkv(67, 131), qkv(69, 133), qkv(71, 135)) <= 2


def test_compiled_by_inductor() -> None:
    def block(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
        return ft.attention(q.sin(), k, v, bias=bias, sink=sink, causal=True).cos()

    rest = (cuda(65, 129, requires_grad=True), cuda(4, requires_grad=True))
    with torch._inductor.config.patch(compile_threads=1):
        assert same(block, (*qkv(), *rest), inner="inductor") == 1


def test_compiled_with_graphs() -> None:
    """mode="reduce-overhead": inductor captures CUDA graphs, forward and backward."""
    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(lambda q, k, v: ft.attention(q * 2, k, v, causal=True) + 1, mode="reduce-overhead")
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            q, k, v = ((x.detach() * (1 + seed)).requires_grad_() for x in qkv())
            out = compiled(q, k, v)
            found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            want = ft.attention(q * 2, k, v, causal=True) + 1
            wanted = torch.autograd.grad(want, (q, k, v), torch.ones_like(want))
            for x, y in zip((out, *found), (want, *wanted), strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_compiled_with_lengths_on_the_device() -> None:
    def decode(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return ft.attention(q, k, v, kv_lengths=lengths, causal=True)

    calls = [(*qkv(3, 129), torch.tensor(n, device="cuda")) for n in (LENGTHS, [1, 129], [0, 5])]
    assert same(decode, *calls) == 1


def test_compiled_packed() -> None:
    def packed(q: Any, k: Any, v: Any, cu: Any) -> Any:
        return ft.attention_packed(q, k, v, cu, cu, causal=True, return_lse=True)

    tensors = [cuda(65, h, 64, requires_grad=True) for h in (4, 2, 2)]
    assert same(packed, (*tensors, torch.tensor(CU, device="cuda")), dynamic=True) == 1


def test_compiled_autocast() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return ft.attention(q, k, v)

    assert same(function, qkv(dtype=torch.float32)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Like torch's own attention: float32 inputs, an output in the dtype of autocast, gradients in float32."""
    q, k, v = (cuda(2, 4, 65, 64, dtype=torch.float32, requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", dtype):
        out, lse = ft.attention(q, k, v, causal=True, return_lse=True)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == dtype
        assert lse.dtype == torch.float32
    assert same_bits(out, ft.attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True))
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in grads)


def some(dtype: torch.dtype = torch.bfloat16, **options: Any) -> operands.Operands:
    return operands.operands(*qkv(dtype=dtype), "auto", options)


CALLS: dict[str, Callable[[], operands.Operands]] = {
    "plain": lambda: some(),
    "float32": lambda: some(torch.float32, causal=True),
    "float64": lambda: some(torch.float64),
    "bias and sink": lambda: some(bias=cuda(65, 129, requires_grad=True), sink=cuda(4, requires_grad=True)),
    "the rest": lambda: some(
        mask=torch.ones(65, 129, dtype=torch.bool, device="cuda").tril(),
        alibi=cuda(2, 4).abs(),
        kv_lengths=torch.tensor(LENGTHS, device="cuda"),
        softcap=2.0,
        scale=0.3,
        dropout=0.2,
        seed=2**64 - 1,
        out_dtype="float32",
        deterministic=True,
    ),
    "packed": lambda: operands.operands(
        *(cuda(65, h, 64, requires_grad=True) for h in (4, 2, 2)),
        "auto",
        {"cu_q": torch.tensor(CU, device="cuda"), "cu_k": torch.tensor(CU, device="cuda", dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(operators.ATTENTION, CALLS[name]())


def test_opcheck_of_the_backward_pass() -> None:
    given = operands.Operands(*(x.detach() if torch.is_tensor(x) else x for x in CALLS["bias and sink"]()))
    out, lse = operators.ATTENTION(*given)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for bias_grad, dlse in ((True, None), (False, torch.ones_like(lse))):
        arguments = (torch.ones_like(out), dlse, out, lse, bias_grad, *given)
        torch.library.opcheck(operators.ATTENTION_BACKWARD, arguments, test_utils=checks)


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.3, "seed": 5}, {"sink": True}], ids=str)
def test_vmap(options: dict[str, Any]) -> None:
    """vmap is a loop, forward and per-example gradients."""
    if "sink" in options:
        options = {"sink": cuda(4, dtype=torch.float32)}
    q, k, v = cuda(3, 2, 4, 33, 64), cuda(2, 3, 2, 65, 64), cuda(2, 2, 65, 64)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return ft.attention(q, k, v, **options).float().square().sum()

    dims = (0, 1, None)
    examples = [(q[n], k[:, n], v) for n in range(3)]
    found = vmap(lambda *x: ft.attention(*x, **options), dims)(q, k, v)
    wanted = torch.stack([ft.attention(*x, **options) for x in examples])
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    grads = vmap(grad(loss, (0, 1, 2)), dims)(q, k, v)
    each = [torch.stack(x) for x in zip(*(grad(loss, (0, 1, 2))(*x) for x in examples), strict=True)]
    for x, y in zip(grads, each, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_through_a_checkpoint() -> None:
    """When the forward pass runs again, dropout drops the same weights."""
    from torch.utils.checkpoint import checkpoint

    q, k, v = qkv()

    def function(q: Any, k: Any, v: Any) -> Any:
        return ft.attention(q, k, v, causal=True, dropout=0.3, seed=7)

    want = torch.autograd.grad(function(q, k, v), (q, k, v), torch.ones_like(q))
    out = checkpoint(function, q, k, v, use_reentrant=False)
    found = torch.autograd.grad(out, (q, k, v), torch.ones_like(q))
    assert all(same_bits(x, y) for x, y in zip(found, want, strict=True))


def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(ft.attention(q, k, v).float().square().sum(), q, create_graph=True)
    with pytest.raises(ft.UnsupportedError, match="differentiated once"):
        dq.sum().backward()


def test_without_autograd() -> None:
    q, k, v = qkv()
    want = ft.attention(q, k, v)
    with torch.no_grad():
        assert not ft.attention(q, k, v).requires_grad
    with torch.inference_mode():
        found = ft.attention(q, k, v)
        assert found.is_inference() and same_bits(found, want)


def test_merge_of_two_halves() -> None:
    """Float32 partials of two halves of the keys, merged: the whole result, and its gradients."""
    q, k, v = qkv()
    cut = 65

    def halves(q: Any, k: Any, v: Any) -> Any:
        parts = [
            ft.attention(q, k[:, :, x], v[:, :, x], return_lse=True, out_dtype=torch.float32)
            for x in (slice(cut), slice(cut, None))
        ]
        return ft.merge(*parts[0], *parts[1])

    out, lse = halves(q, k, v)
    want, want_lse = ft.attention(q, k, v, return_lse=True, out_dtype=torch.float32)
    torch.testing.assert_close(out, want, rtol=1e-2, atol=5e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    ones = torch.ones_like(out), torch.ones_like(lse)
    found, wanted = (torch.autograd.grad(x, (q, k, v), ones) for x in ((out, lse), (want, want_lse)))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_gradients_of_blocks_of_keys(backend: str) -> None:
    """Shares of the gradients, in float32 and added to buffers in the order of a fused projection."""
    if reason := ft.dispatch.named(backend).missing():
        pytest.skip(reason)
    q, k, v, dout = (torch.randn(2, 300, 4, 64, device="cuda").bfloat16().transpose(1, 2) for _ in range(4))
    out, lse = ft.attention(q, k, v, return_lse=True, backend=backend)
    assert out.stride() == q.stride()
    whole = ft.attention_backward(dout, q, k, v, out, lse, grad_dtype="float32", backend=backend)
    fused = torch.zeros(2, 300, 3, 4, 64, device="cuda")
    into = ft.Grads(*(x.transpose(1, 2) for x in fused.unbind(2)), None, None)
    for keys in (slice(0, 130), slice(130, 300)):
        part = into._replace(dk=into.dk[:, :, keys], dv=into.dv[:, :, keys])
        block = k[:, :, keys], v[:, :, keys]
        ft.attention_backward(dout, q, *block, out, lse, grad_dtype="float32", into=part, backend=backend)
    for x, y in zip(into[:3], whole[:3], strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
