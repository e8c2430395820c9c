"""attention_backward() by the Triton kernels: blocks of keys, float32 gradients, and buffers that are added to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile import dispatch
from flashtile.results import Target
from tests.backends.triton import kernels
from tests.support.grid import Call, Case, Size, build
from tests.support.key_blocks import key_blocks

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(kernels.DEVICE == "cuda", reason="tests/gpu does this on the GPU"),
]
SIZE = Size(1, 2, 1, 34, 70, 16, 16)


def backward(call: Call, out: Any, lse: Any, dtype: str, into: ft.Grads | None = None) -> ft.Grads:
    run, inputs = dispatch.named("triton").prepare(kernels.problem_of(call))
    given = map(kernels.tensor, (call.dout, out, lse, call.dlse))
    target = Target(dtype) if into is None else Target(dtype, into)
    grads: ft.Grads = run.backward(inputs, *given, target=target)
    return grads


def assert_blocks_sum_to_the_whole(call: Call, tolerance: float, first: int = 0) -> None:
    wide = [x.astype(np.float64) for x in (call.dout, call.q, call.k, call.v)]
    options = {name: x.astype(np.float64) if name == "sink" else x for name, x in call.options.items()}
    out, lse = ft.attention(*wide[1:], **options, return_lse=True, backend="reference")
    whole = ft.attention_backward(*wide, out, lse, **options, backend="reference")
    out, lse = out.astype(np.float32), lse.astype(np.float32)
    into = ft.Grads(*(torch.zeros(x.shape) for x in (call.q, call.k, call.v)), None, None)
    for block in key_blocks(call.k, call.v, call.options, call.q.shape[-2], [33, 50]):
        part = Call(call.q, block.k, block.v, block.options, call.dout, None)
        buffers = into._replace(dk=into.dk[:, :, block.keys], dv=into.dv[:, :, block.keys])
        found = backward(part, out, lse, "float32", buffers)
        assert all(x is y for x, y in zip(found[:3], buffers[:3], strict=True))
    for x, y in zip(into[first:3], whole[first:3], strict=True):
        assert np.abs(x.numpy() - y).max() < tolerance * np.abs(y).max()


@pytest.mark.parametrize("options", [("causal",), ("window", "softcap", "sink")], ids="+".join)
def test_blocks_of_keys_sum_to_the_whole(options: tuple[str, ...]) -> None:
    assert_blocks_sum_to_the_whole(build(Case(SIZE, "float32", options)), 1e-5)


def test_blocks_of_rows_with_a_coarse_lse() -> None:
    """Weights of scores beyond 2^15 are recomputed, but not as if the keys of a block were all."""
    call = build(Case(SIZE, "float32", ("plain",)))
    rng = np.random.default_rng(0)
    q, k = np.ones_like(call.q), np.zeros_like(call.k)
    k[..., 0] = rng.integers(1, 3, call.k.shape[:-1]) * 2.0**16
    call = Call(q, k, call.v, {"scale": 1.0}, call.dout, None)
    assert_blocks_sum_to_the_whole(call, 0.02, first=1)  # dQ is 0 but for rounding: equal keys share all the weight


def test_gradients_that_are_not_rounded() -> None:
    call = build(Case(SIZE, "bfloat16", ("causal",)))
    out, lse = ft.attention(call.q, call.k, call.v, causal=True, return_lse=True, backend="tiles")
    rounded, wide = (backward(call, out, lse, dtype) for dtype in ("bfloat16", "float32"))
    for x, y in zip(rounded[:3], wide[:3], strict=True):
        assert x.dtype is torch.bfloat16 and y.dtype is torch.float32
        torch.testing.assert_close(x.float(), y, rtol=2**-7, atol=1e-6)  # the interpreter truncates
        assert not torch.equal(x.float(), y)
