"""attention() of DTensors, in two processes, against one: eager, compiled, by local_map, in tensor-parallel models."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashtile as ft  # noqa: E402
from flashtile.compat.flash_attn import flash_attn_func  # noqa: E402
from flashtile.compat.sdpa import scaled_dot_product_attention  # noqa: E402
from tests.support.processes import Ranks  # noqa: E402

distributed = torch.distributed
pytestmark = pytest.mark.skipif(
    not distributed.is_available() or sys.platform != "linux", reason="this torch has no gloo"
)


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def distribute(x: Any, axis: int | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(x, mesh(), [Replicate() if axis is None else Shard(axis)])


def randn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs() -> dict[str, Any]:
    found = {"q": randn(3, 4, 16, 8), "k": randn(3, 2, 12, 8, seed=1), "v": randn(3, 2, 12, 6, seed=2)}
    found |= {"bias": randn(1, 4, 16, 12, seed=3), "sink": randn(4, seed=4)}
    return {name: x.requires_grad_() for name, x in found.items()}


def attend(attention: Any, x: dict[str, Any], **more: Any) -> tuple[Any, list[Any]]:
    """The results, and gradients of both."""
    q, k, v, *_ = x.values()
    out, lse = attention(q, k, v, bias=x["bias"], sink=x["sink"], causal=True, return_lse=True, **more)
    return (out, lse), torch.autograd.grad(out.square().sum() + lse.sin().sum(), list(x.values()))


# The axes that q, k, v, bias and sink are split by.
SPLITS = {
    "replicated": (None, None, None, None, None),
    "batch": (0, 0, 0, None, None),
    "heads": (1, 1, 1, 1, 0),
    "heads of q": (1, None, None, None, None),
    "batch of v": (None, None, 0, None, None),
    "heads of the bias": (None, None, None, 1, None),
    "different": (0, 1, None, 1, None),
}


def compare(_rank: int, _size: int, axes: tuple[int | None, ...], compiled: bool, dropout: float = 0.0) -> None:
    attention: Any = partial(ft.attention, dropout=dropout, seed=5, origin=ft.Origin(sequence=2) if dropout else None)
    x = inputs()
    want = attend(attention, x, alibi=torch.ones(4).double())
    if compiled:
        torch._dynamo.reset()
        attention = torch.compile(ft.attention, fullgraph=True, backend="aot_eager")
    shards = {n: distribute(y.detach(), axis).requires_grad_() for (n, y), axis in zip(x.items(), axes, strict=True)}
    (out, lse), grads = attend(attention, shards, alibi=distribute(torch.ones(4).double(), None))
    split = next((axis for axis in axes if axis is not None), None)
    if split is not None:
        assert out.placements[0].is_shard(split) and lse.placements[0].is_shard(split)
    for found, wanted in zip((out, lse, *grads), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=0, atol=1e-13)


# The first DTensors of the processes are compiled: the operators must be known to torch by then.
@pytest.mark.parametrize("split", ["heads", "different"])
def test_compiled_results_and_gradients_are_those_of_one_process(split: str, two: Ranks) -> None:
    two.run(compare, SPLITS[split], True)


@pytest.mark.parametrize("split", SPLITS)
def test_results_and_gradients_are_those_of_one_process(split: str, two: Ranks) -> None:
    two.run(compare, SPLITS[split], False)


@pytest.mark.parametrize("split", SPLITS)
def test_shards_drop_what_the_whole_drops(split: str, two: Ranks) -> None:
    two.run(compare, SPLITS[split], False, 0.5)


def refused(_rank: int, _size: int) -> None:
    rows = distribute(randn(2, 2, 16, 8), 2)
    whole = distribute(randn(2, 2, 16, 8), None)
    for call in (
        lambda: ft.attention(rows, rows, rows),
        lambda: ft.attention(whole, whole, rows),
        lambda: ft.attention(rows, rows, rows, layout="bhnd", causal=True),
    ):
        with pytest.raises(ft.UnsupportedError, match=r"^[qv]: expected a DTensor .*flashtile.distributed.attention"):
            call()
    with pytest.raises(Exception, match=r"flashtile\.distributed\.attention"):
        torch.compile(ft.attention, fullgraph=True, backend="eager")(rows, rows, rows)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"query: expected a DTensor .*flashtile.distributed.attention"):
        scaled_dot_product_attention(rows, rows, rows)
    with pytest.raises(ft.DTypeError, match=r"^mask: expected a DTensor like others of the call, got a Tensor"):
        ft.attention(whole, whole, whole, mask=torch.ones(16, 16, dtype=torch.bool))
    with pytest.raises(ft.DTypeError, match=r"^q: expected a DTensor like others of the call, got a Tensor"):
        ft.attention(whole.to_local(), whole, whole)
    heads = distribute(randn(2, 2, 16, 8), 1)
    compiled = torch.compile(partial(ft.attention, dropout=0.5, seed=1), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="dropout: expected 0 for shards of the batch or of heads in compiled code"):
        compiled(heads, heads, heads)
    torch._dynamo.reset()
    one = distribute(randn(2, 1, 16, 8), None)
    with pytest.raises(ft.UnsupportedError, match=r"^k: expected a number of heads that 2 shards .* divide, got 1"):
        ft.attention(heads, one, one)


def test_what_cannot_be_split_is_refused(two: Ranks) -> None:
    two.run(refused)


def others(_rank: int, _size: int) -> None:
    """Other ways to the operators."""
    x = [randn(2, 4, 16, 8, seed=n) for n in range(3)]
    heads = [distribute(y, 1) for y in x]
    close = torch.testing.assert_close
    want = ft.attention(*x, causal=True)
    with torch.inference_mode():
        close(ft.attention(*heads, causal=True).full_tensor(), want)
    sdpa = scaled_dot_product_attention(*heads, is_causal=True)
    assert sdpa.placements[0].is_shard(1)
    close(sdpa.full_tensor(), want)
    turned = ft.attention(*[y.transpose(1, 2) for y in heads], causal=True, layout="bnhd")
    assert turned.placements[0].is_shard(2)
    close(turned.full_tensor(), want.transpose(1, 2))
    flash = flash_attn_func(*[y.transpose(1, 2) for y in heads], causal=True)
    close(flash.full_tensor(), want.transpose(1, 2))
    packed, starts = [y[0].transpose(0, 1).contiguous() for y in x], torch.tensor([0, 5, 16])
    found = ft.attention_packed(*[distribute(y, 1) for y in packed], *[distribute(starts, None)] * 2)
    close(found.full_tensor(), ft.attention_packed(*packed, starts, starts))
    dropped = [distribute(y, None) for y in x]
    found = ft.attention(*dropped, dropout=0.5, seed=7)
    close(found.full_tensor(), ft.attention(*x, dropout=0.5, seed=7))
    halves = [[y[..., half, :] for y in heads[1:]] for half in (slice(6), slice(6, None))]
    parts = [y for half in halves for y in ft.attention(heads[0], *half, return_lse=True)]
    close(ft.merge(*parts)[0].full_tensor(), ft.attention(*x))


def test_other_ways_to_the_operators(two: Ranks) -> None:
    two.run(others)


def by_local_map(_rank: int, _size: int) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.experimental import local_map

    x = [randn(2, 4, 16, 8, seed=n).requires_grad_() for n in range(3)]
    heads = [distribute(y.detach(), 1).requires_grad_() for y in x]
    split = [Shard(1)]
    attention = local_map(
        lambda q, k, v: ft.attention(q, k, v, causal=True),
        out_placements=split,
        in_placements=(split, split, split),
        device_mesh=mesh(),
    )
    out, want = attention(*heads), ft.attention(*x, causal=True)
    torch.testing.assert_close(out.full_tensor(), want)
    grads = zip(torch.autograd.grad(out.sum(), heads), torch.autograd.grad(want.sum(), x), strict=True)
    for found, wanted in grads:
        torch.testing.assert_close(found.full_tensor(), wanted)


def test_by_local_map(two: Ranks) -> None:
    two.run(by_local_map)


class Attention(torch.nn.Module):
    """A layer of four query heads and two key heads."""

    def __init__(self) -> None:
        super().__init__()
        for name, width in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
            setattr(self, name, torch.nn.Linear(32, width, bias=False, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(ft.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))


def tensor_parallel(_rank: int, _size: int, local: bool, compiled: bool) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    torch.manual_seed(0)
    layer, x = Attention(), randn(2, 16, 32).requires_grad_()
    layer(x).square().sum().backward()
    want = [x.grad, *(p.grad for p in layer.parameters())]
    wanted = layer(x).detach()
    torch.manual_seed(0)
    plan: Any = {name: ColwiseParallel(use_local_output=local) for name in "qkv"} | {"o": RowwiseParallel()}
    shards: Any = parallelize(Attention(), mesh(), plan)
    if compiled:
        torch._dynamo.reset()
        shards = torch.compile(shards, fullgraph=True, backend="aot_eager")
    y = x.detach().clone().requires_grad_()
    out = shards(y)
    torch.testing.assert_close(out, wanted)
    out.square().sum().backward()
    grads = [y.grad, *(p.grad.full_tensor() for p in shards.parameters())]
    for found, each in zip(grads, want, strict=True):
        torch.testing.assert_close(found, each)


@pytest.mark.parametrize(("local", "compiled"), [(True, False), (False, False), (False, True)])
def test_tensor_parallel_plans(local: bool, compiled: bool, two: Ranks) -> None:
    two.run(tensor_parallel, local, compiled)
