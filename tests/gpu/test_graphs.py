"""CUDA graphs: a call is captured once, and replayed with new numbers in the same memory, including lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from flashtile.backends.gluon import work_counters
from flashtile.backends.gpu import tensors
from flashtile.compat.sdpa import scaled_dot_product_attention
from tests.gpu.oracle import standard
from tests.gpu.placement import same_bits
from tests.gpu.runner import Given, each_backend
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.support.grid import Case, Size, build

pytestmark = [pytest.mark.gpu, *each_backend]

CALLS = {
    "plain": Case(LONG, "bfloat16", ("causal",)),
    "everything": Case(LONG, "bfloat16", ("everything",)),
    "float32": Case(RAGGED, "float32", ("causal",)),
    "decode": Case(DECODE, "bfloat16", ("kv_lengths",)),
    "packed": Case(PACKED, "bfloat16", ("kv_lengths",)),
    "spans": Case(LONG, "bfloat16", ("spans", "causal")),
    "packed spans": Case(PACKED, "bfloat16", ("spans",)),
}


def capture(function: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A graph of this function, and the tensors that each replay fills."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):  # kernels are compiled and loaded outside the capture
            function()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def renew(given: Given, seed: int) -> None:
    """Write other numbers into the same memory."""
    torch.manual_seed(seed)
    tensors = {**given.arguments, "dout": given.dout, "dlse": given.dlse}
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            x.copy_(torch.rand_like(x) if name == "alibi" else torch.randn_like(x))
        elif name == "mask":
            x.copy_(torch.rand(x.shape, device=x.device) < 0.5)
        elif name == "kv_lengths":
            x.copy_((torch.rand(x.shape, device=x.device) * (x + 1)).to(x.dtype).clamp(max=x))
        elif isinstance(x, ft.Spans):
            limits = torch.randint(0, 700, x.limits.flatten(3).shape, device=x.limits.device).sort(-1).values
            x.limits.copy_(limits.view(x.limits.shape))


@pytest.mark.parametrize("work", ["forward", "step"])
@pytest.mark.parametrize("name", CALLS)
def test_replays(name: str, work: str) -> None:
    """Each replay gives the bits of the same call outside the graph."""
    given = Given(build(CALLS[name]), "cuda")
    function = getattr(given, work)
    graph, results = capture(function)
    seen = []
    for seed in range(3):
        renew(given, seed)
        for x in results:
            x.detach().fill_(torch.nan)
        graph.replay()
        found = [x.clone() for x in results]
        assert given.alike(found, function()), f"replay {seed}"
        seen.append(found[0])
    assert not same_bits(seen[0], seen[1]), "new numbers, new results"


def replay_beside(given: Given, work: str) -> None:
    """Replay two graphs of a call, each on its own stream, next to that call on the stream of their capture."""
    function = getattr(given, work)
    want = [x.clone() for x in function()]
    graphs = [capture(function) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    found = []
    for _ in range(30):
        for stream, (graph, results) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                found.append([x.clone() for x in results])
        found.append(list(function()))
    torch.cuda.synchronize()
    for n, each in enumerate(found):
        assert given.alike(each, want), f"number {n}"


@pytest.mark.parametrize("work", ["forward", "step"])
@pytest.mark.parametrize("name", CALLS)
def test_replays_beside_other_streams(name: str, work: str) -> None:
    replay_beside(Given(build(CALLS[name]), "cuda"), work)


def test_the_buffer_of_an_unused_lse_outlives_the_graph_that_first_used_it() -> None:
    """All later calls on any stream write there."""
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    want = ft.attention(q, q, q)
    ft.attention(q, q, q)
    tensors._discard_buffers.clear()
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        out = ft.attention(q, q, q)
    first.replay()
    assert same_bits(out, want)
    del out, first
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second):
        out = ft.attention(q, q, q)
    for _ in range(3):
        second.replay()
        others = [torch.zeros(1 << 16, device="cuda") for _ in range(20)]  # as large as that buffer
        assert same_bits(ft.attention(q, q, q), want) and same_bits(out, want)
        assert not any(x.any() for x in others)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, when its compiler is imported
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # from torch, for a graph in which its memory is set up
def test_graphs_of_torch_compile_do_not_overwrite_permanent_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up in the memory of its graphs, with no permanent memory from before."""
    monkeypatch.setattr(tensors, "_discard_buffers", {})
    for name in ("_free", "_banks", "_taken", "_clearing"):
        monkeypatch.setattr(work_counters, name, {})
    q = torch.randn(2, 8, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(q: Tensor) -> Tensor:
        loss: Tensor = ft.attention(q, q, q, causal=True).float().square().sum()
        return loss

    (want,) = torch.autograd.grad(step(q), q)
    tensors._discard_buffers.clear()
    for each in (work_counters._free, work_counters._banks, work_counters._taken, work_counters._clearing):
        each.clear()
    compiled = torch.compile(step, mode="reduce-overhead")
    for _ in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        (found,) = torch.autograd.grad(compiled(q), q)
        others = [torch.zeros(1 << 16, device="cuda", dtype=torch.int32) for _ in range(20)]
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
        assert not any(x.any() for x in others)
    kept = [x.counters for free in work_counters._free.values() for x in free]
    kept += [*tensors._discard_buffers.values(), *(bank for banks in work_counters._banks.values() for bank in banks)]
    segments = torch.cuda.memory_snapshot()
    for x in kept:
        (segment,) = (s for s in segments if s["address"] <= x.data_ptr() < s["address"] + s["total_size"])
        assert tuple(segment["segment_pool_id"]) == (0, 0)


@pytest.mark.parametrize(("n_q", "work"), [(1, "forward"), (65, "forward"), (65, "step")])
def test_lengths_are_read_at_replay(n_q: int, work: str) -> None:
    """A cache that fills up: the graph is captured once, kv_lengths grows on the device."""
    call = build(Case(Size(2, 8, 4, n_q, 2047, 64, 64), "bfloat16", ("causal",)))
    given = Given(replace(call, options=call.options | {"kv_lengths": np.array([1, 1])}), "cuda")
    lengths = given.arguments["kv_lengths"]
    function = getattr(given, work)
    graph, results = capture(function)
    out, lse = results[:2]
    for a, b in ((1, 2047), (500, 3), (0, 1024), (2047, 2046), (66, 65)):
        lengths.copy_(torch.tensor([a, b]))
        graph.replay()
        assert given.alike(results, function()), (a, b)
        for n, keys in enumerate((a, b)):
            q, k, v = (given.arguments[name][n : n + 1] for name in "qkv")
            want, want_lse = standard(q, k[:, :, :keys], v[:, :, :keys], causal=True)
            torch.testing.assert_close(out[n : n + 1].double(), want, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse[n : n + 1].double(), want_lse, rtol=1e-5, atol=1e-5)


def test_a_seed_is_read_at_replay() -> None:
    """Both passes drop the weights of the seed that the tensor holds at replay."""
    call = build(Case(LONG, "bfloat16", ("causal",)))
    seed = torch.tensor(1, device="cuda")

    def given(seed: object) -> Given:
        return Given(replace(call, options=call.options | {"dropout": 0.25, "seed": seed}), "cuda")

    by_tensor = given(seed)  # kept: the graph reads its memory
    graph, results = capture(by_tensor.step)
    for number in (1, 2, 2**40, -7):
        seed.fill_(number)
        graph.replay()
        by_number = given(number % 2**64)
        assert by_number.alike([x.clone() for x in results], by_number.step()), number


def test_dropout_of_others_differs_at_each_replay() -> None:
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    graph, (out,) = capture(lambda: (scaled_dot_product_attention(q, q, q, dropout_p=0.5),))
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(out.clone())
    assert not same_bits(*seen)


def test_starts_are_read_at_replay() -> None:
    """Packed sequences move their boundaries between replays."""
    call = build(Case(Size.packed(4, 2, 64, 64, (240, 250), (347, 377)), "bfloat16", ("causal",)))
    given = Given(call, "cuda")
    cu_q, cu_k = given.arguments["cu_q"], given.arguments["cu_k"]
    graph, results = capture(given.step)
    for middle_q, middle_k in ((1, 1), (587, 0), (0, 627), (64, 64)):
        cu_q[1], cu_k[1] = middle_q, middle_k
        graph.replay()
        found = [x.clone() for x in results]
        assert given.alike(found, given.step()), (middle_q, middle_k)
        for rows, keys in ((slice(0, middle_q), slice(0, middle_k)), (slice(middle_q, None), slice(middle_k, None))):
            q, k, v = (given.arguments[n][x].transpose(0, 1)[None] for n, x in (("q", rows), ("k", keys), ("v", keys)))
            want, _ = standard(q, k, v, causal=True)
            torch.testing.assert_close(found[0][rows].double(), want[0].transpose(0, 1), rtol=2e-2, atol=2e-2)
