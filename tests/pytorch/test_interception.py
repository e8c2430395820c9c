"""Calls inside torch's context_parallel(), where a rank has a part of the sequences, are answered, or refused by name.

tests/distributed has these calls in several processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import flashtile as ft  # noqa: E402
from flashtile.compat.sdpa import scaled_dot_product_attention  # noqa: E402
from flashtile.pytorch import calls, context_parallel, interception  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or sys.platform != "linux", reason="this torch has no gloo"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, for a prototype feature
]
REFUSAL = r"^(q, k, v|query, key, value): expected whole sequences, got a rank's part of them, as inside torch's "


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A device mesh of this process alone, which torch treats like any other."""
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def qkv() -> list[Any]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 16, 8, generator=rng) for _ in range(3)]


def context(mesh: Any) -> Any:
    from torch.distributed.tensor.experimental import context_parallel

    buffers = qkv()
    return context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3)


CALLS = {
    "attention": lambda q, k, v: ft.attention(q, k, v),
    "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v),
    "gradients": lambda q, k, v: ft.attention(q.requires_grad_(), k, v),
}


@pytest.mark.parametrize("cached", [False, True], ids=["first", "cached"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_answered_inside(name: str, cached: bool, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls._known.clear()
    given, call = qkv(), CALLS[name]
    want = call(*given)
    if not cached:
        calls._known.clear()
    answered = []
    answer = context_parallel.attention
    monkeypatch.setattr(context_parallel, "attention", lambda *a: answered.append(a) or answer(*a))
    with context(mesh):
        for _ in range(2):
            torch.testing.assert_close(call(*given), want)
    assert len(answered) == 2
    assert torch.equal(call(*given), want)
    assert len(answered) == 2


def test_packed_sequences_are_refused_inside(mesh: Any) -> None:
    rows = [x[0].transpose(0, 1) for x in qkv()]
    with context(mesh), pytest.raises(ft.UnsupportedError, match=r"^cu_q: expected None inside torch's context_par"):
        ft.attention_packed(*rows, *[torch.tensor([0, 16])] * 2)


def test_graphs_compiled_before_are_refused_inside(mesh: Any) -> None:
    given = qkv()
    compiled = torch.compile(ft.attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), ft.attention(*given))
    with context(mesh), pytest.raises(ft.UnsupportedError, match=REFUSAL):
        compiled(*given)
    torch._dynamo.reset()


def test_the_plan_of_context_parallel_is_refused(mesh: Any) -> None:
    """The newer way: a plan makes DTensors of the inputs of a module, split along their sequences."""
    attention = pytest.importorskip("torch.distributed.tensor.experimental._attention")
    if not hasattr(attention, "_ContextParallel"):
        pytest.skip("this torch has no _ContextParallel")
    from torch.distributed.tensor.parallel import parallelize_module

    class Module(torch.nn.Module):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.call = call

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return self.call(q, k, v)

    attention._enable_context_parallel_dispatcher()
    try:
        for call in (CALLS["attention"], CALLS["sdpa"]):
            plan = attention._ContextParallel(2, attention._ContextParallel.AttentionType.SDPA)
            module = parallelize_module(Module(call), mesh, plan)
            with pytest.raises(ft.UnsupportedError, match=r"^(q|query): expected a DTensor split by batch or heads"):
                module(*qkv())
    finally:
        attention._disable_context_parallel_dispatcher()


def test_context_parallel_by_a_mode(mesh: Any) -> None:
    """torch 2.8 can also do it by a mode, instead of replacing its attention function."""
    from torch.overrides import TorchFunctionMode

    class DistributeFunction(TorchFunctionMode):
        __module__ = interception.CONTEXT_PARALLEL[0]

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    given = qkv()
    want = ft.attention(*given)
    mode: Any = DistributeFunction()
    mode._device_mesh = mesh
    with mode:
        assert interception.context_parallel_mesh() is mesh
        torch.testing.assert_close(ft.attention(*given), want)


def test_other_replacements_of_torchs_attention_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = qkv()
    ft.attention(*given)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", nullcontext)
    assert calls.lookup(*given, "auto", {}) is not None
    ft.attention(*given, causal=True)
