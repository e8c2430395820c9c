"""A model in FSDP2 and DDP, with and without checkpointing, in two processes, has the gradients of one process."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashtile as ft  # noqa: E402
from tests.support.processes import Ranks  # noqa: E402

distributed = torch.distributed
pytestmark = pytest.mark.skipif(
    not distributed.is_available() or sys.platform != "linux", reason="this torch has no gloo"
)


class Layer(torch.nn.Module):
    """Attention with grouped heads, a learned bias and sink, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 64)
        self.o = torch.nn.Linear(32, 32)
        self.bias = torch.nn.Parameter(torch.randn(4, 1, 12))
        self.sink = torch.nn.Parameter(torch.randn(4))

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
        out = ft.attention(q, k, v, causal=True, bias=self.bias, sink=self.sink)
        return x + self.o(out.transpose(1, 2).flatten(2))


class Checkpointed(torch.nn.Module):
    """A layer whose activations are recomputed: all, or all but those of attention."""

    def __init__(self, layer: Any, selective: bool) -> None:
        super().__init__()
        self.layer, self.selective = layer, selective

    def forward(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        from flashtile.pytorch import OPERATORS

        contexts = partial(create_selective_checkpoint_contexts, OPERATORS)
        how: Any = {"context_fn": contexts} if self.selective else {}
        return checkpoint(self.layer, x, use_reentrant=False, **how)


def model(checkpointing: str) -> Any:
    torch.manual_seed(0)
    layers = [Layer().double() for _ in range(2)]
    wrapped = layers if checkpointing == "none" else [Checkpointed(x, checkpointing == "selective") for x in layers]
    return torch.nn.Sequential(*wrapped)


def loss(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def train(rank: int, _size: int, way: str, checkpointing: str, compiled: bool) -> None:
    x = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    single = model("none")
    wanted = loss(single, x)
    wanted.backward()

    found: Any = model(checkpointing)
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in found:
            fully_shard(layer)
        fully_shard(found)
    else:
        found = torch.nn.parallel.DistributedDataParallel(found)
    if compiled:
        torch._dynamo.reset()
        found = torch.compile(found, backend="aot_eager")
    mine = loss(found, x.chunk(2)[rank])
    mine.backward()
    total = mine.detach().clone()
    distributed.all_reduce(total)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)
    close(total / 2, wanted.detach())
    for p, want in zip(found.parameters(), single.parameters(), strict=True):
        close(p.grad.full_tensor() if way == "fsdp" else p.grad, want.grad)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_gradients_are_those_of_one_process(way: str, checkpointing: str, two: Ranks) -> None:
    two.run(train, way, checkpointing, False)


@pytest.mark.parametrize("way", [pytest.param("fsdp", marks=pytest.mark.slow), "ddp"])
def test_compiled_gradients_are_those_of_one_process(way: str, two: Ranks) -> None:
    two.run(train, way, "selective", True)
