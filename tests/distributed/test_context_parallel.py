"""Inside torch's context_parallel(), attention() and SDPA attend to the sequences of all processes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashtile as ft  # noqa: E402
from flashtile.compat.sdpa import scaled_dot_product_attention  # noqa: E402
from tests.support.processes import Ranks  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux", reason="this torch has no gloo"
)


CALLS = {
    "attention": lambda q, k, v: ft.attention(q, k, v, causal=True),
    "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "window and lse": lambda q, k, v: ft.attention(q, k, v, window=(5, 2), return_lse=True)[1][..., None].sin(),
    "bnhd": lambda q, k, v: ft.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bnhd", softcap=3.0
    ).transpose(1, 2),
    "spans": lambda q, k, v: ft.attention(q, k, v, spans=ft.Spans(torch.tensor([[[3]]]), torch.tensor([[[11]]]))),
}


def run(call: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    """The output for x, (batch, tokens, width), projected, and the gradient of the projection."""
    weight = weight.detach().requires_grad_()
    q, k, v = (x @ weight).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
    out = call(q, k, v)
    out.square().sum().backward()
    return out.detach(), weight.grad


def compare(_rank: int, _size: int, name: str, balanced: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = init_device_mesh("cpu", (2,))
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 16, generator=rng, dtype=torch.float64)
    weight = torch.randn(16, 64, generator=rng, dtype=torch.float64)
    want, wanted_gradient = run(CALLS[name], x, weight)
    for _ in range(2):  # the same calls are known by then, outside and inside
        _attention._cp_options.enable_load_balance = balanced
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            assert x.shape[1] == 12
            out, gradient = run(CALLS[name], x, weight)
            (out,) = context_parallel_unshard(mesh, [out], [2])
        torch.distributed.all_reduce(gradient)
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-12)
        outside, _ = run(CALLS[name], x, weight)
        assert torch.equal(outside, want)


@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "contiguous"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_one_process(name: str, balanced: bool, two: Ranks) -> None:
    two.run(compare, name, balanced)
