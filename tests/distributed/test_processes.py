"""Every method on gloo processes: results, gradients, bytes, torch.compile and memory, against one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import flashtile as ft  # noqa: E402
from flashtile import distributed  # noqa: E402
from flashtile.distributed import Shards, groups  # noqa: E402
from flashtile.distributed.channel import Channel  # noqa: E402
from flashtile.errors import PeerError  # noqa: E402
from tests.distributed.test_methods import OPTIONS, methods, option  # noqa: E402
from tests.support import sharded  # noqa: E402
from tests.support.processes import Ranks  # noqa: E402

MAKERS = ("contiguous", "zigzag", "striped")
LENGTHS = [13, 30, 6]


@pytest.fixture(scope="module", params=[2, 4, pytest.param(8, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


def errors_of_cases(rank: int, size: int, cases: list[tuple[str, str, Any]]) -> list[float]:
    found = []
    for name, maker, method in cases:
        chosen = option(name, sum(LENGTHS), 4, np.random.default_rng(7)) if name else {}
        whole = sharded.make(LENGTHS, 4, 2, chosen, dlse=maker == "zigzag")
        shards = getattr(Shards, maker)(documents=LENGTHS, ranks=size)
        mine = sharded.on_rank(whole, dist.group.WORLD, shards, method)
        wanted = sharded.part_of(sharded.in_one_process(whole, LENGTHS), whole, shards, rank)
        found.append(max(sharded.largest_error(mine, wanted).values()))
    return found


def run_cases(ranks: Ranks, cases: list[tuple[str, str, Any]]) -> None:
    for rank, errors in enumerate(ranks.run(errors_of_cases, cases)):
        wrong = [(case, error) for case, error in zip(cases, errors, strict=True) if not error <= 1e-12]
        assert not wrong, (rank, wrong)


def of_pairs(name: str, method: Any) -> bool:
    return name.endswith("pairs") and method not in ("gather", "ring")


def test_every_method_with_every_option(ranks: Ranks) -> None:
    cases = [
        (name, MAKERS[n % 3], method)
        for n, name in enumerate(OPTIONS)
        for method in methods(ranks.size)
        if not of_pairs(name, method)
    ]
    run_cases(ranks, cases)


@pytest.mark.slow
def test_the_whole_product(ranks: Ranks) -> None:
    for maker in MAKERS:
        for method in methods(ranks.size):
            run_cases(ranks, [(name, maker, method) for name in OPTIONS if not of_pairs(name, method)])


def bytes_of(rank: int, size: int, maker: str, method: Any, chosen: dict[str, Any]) -> list[int]:
    """What a rank sends, forward and backward."""
    whole = sharded.make([96], 4, 2, chosen, dtype=torch.float32, dim=8, dim_v=8)
    shards = getattr(Shards, maker)(documents=[96], ranks=size)
    channels, make = [], groups.channel_of

    def recorded(name: str, method: str) -> Any:
        channels.append(make(name, method))
        return channels[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashtile.distributed.operators.channel_of", recorded)
        sharded.on_rank(whole, dist.group.WORLD, shards, method)
    assert len(channels) == 2
    return [x.bytes_sent for x in channels]


def least_bytes(maker: str, method: str, size: int, visible: Any) -> int:
    """The least that all ranks together must send, by the pairs that are visible, in tokens times bytes."""
    shards = getattr(Shards, maker)(documents=[96], ranks=size)
    held = [shards.indices(rank) for rank in range(size)]
    keys, of_float = 2 * 2 * 16, 4  # batch, key heads, dims of k and v
    if method == "ulysses":
        away = [96 - len(rows) for rows in held]
        mine = [range(4 * rank // size, 4 * (rank + 1) // size) for rank in range(size)]
        heads, kv_heads = [len(x) for x in mine], [len({h // 2 for h in x}) for x in mine]
        # q and out, k and v; then dout and dq, dk and dv: each of 2 sequences and 8 columns.
        rows = sum(n * (2 * h + 2 * g) for n, h, g in zip(away, heads, kv_heads, strict=True))
        return of_float * 2 * 2 * 8 * rows
    need = [set(np.flatnonzero(visible[rows].any(0)).tolist()) for rows in held]
    forward = gradients = 0
    for source in range(size):
        own = set(held[source].tolist())
        if method == "gather":
            forward += sum(len(own & need[rank]) for rank in range(size) if rank != source)
            gradients = forward
            continue
        for hop in range(1, size):
            later = set().union(*(need[(source + k) % size] for k in range(hop, size)))
            forward += len(own & later)
            gradients += len(own & later)  # goes on from the rank before, or, at the first hop, comes home
    return of_float * keys * (2 * forward + gradients)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("chosen", [{}, {"causal": True}, {"window": (9, 0)}], ids=str)
def test_bytes(ranks: Ranks, maker: str, method: str, chosen: dict[str, Any]) -> None:
    n = np.arange(96)
    distance = n[None] - n[:, None]
    visible = np.ones((96, 96), bool) if not chosen else (distance <= 0) & (distance >= -chosen.get("window", (96,))[0])
    counted = ranks.run(bytes_of, maker, method, chosen)
    sent = sum(map(sum, counted))
    least = least_bytes(maker, method, ranks.size, visible)
    assert least <= sent * 1.0001
    assert sent <= 1.05 * least + (0 if method != "ulysses" else 4 * 2 * 4 * 96), (sent, least)
    shards = getattr(Shards, maker)(96, ranks=ranks.size)
    planned = ft.plan((2, 4, 96, 8), (2, 2, 96, 8), shards=shards, **chosen).parallel
    by_name = {x.method: (x.sent, x.sent_backward) for x in planned}
    assert by_name[method] == tuple(map(max, zip(*counted, strict=True)))


def compiled(rank: int, size: int, method: Any) -> float:
    """The largest difference of a compiled call and its gradients from an eager one; the graph must not break."""
    rng = np.random.default_rng(3)
    chosen = {k: x for name in ("spans", "alibi", "sink", "causal") for k, x in option(name, 48, 4, rng).items()}
    whole = sharded.make([48], 4, 2, chosen)
    shards = Shards.zigzag(48, ranks=size)
    leaves = [shards.shard(x, rank).requires_grad_() for x in (whole.q, whole.k, whole.v)]

    def layer(q: Any, k: Any, v: Any) -> Any:
        shared = dict(chosen, group=dist.group.WORLD, shards=shards, method=method)
        return distributed.attention(q.sin(), k, v * 2, **shared).cos()

    results = []
    for run in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
        out = run(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, shards.shard(whole.dout, rank))])
    return max(float((x - y).abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_compiled(ranks: Ranks, method: str) -> None:
    if ranks.size > 2:
        pytest.skip("tried by two processes: each must import the compiler")
    assert max(ranks.run(compiled, method)) <= 1e-12


def compiled_for_documents(rank: int, size: int) -> tuple[float, int]:
    """Batches of other documents, on a mesh: the largest error, and how often the call was compiled."""
    from torch._dynamo.testing import CompileCounter
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    counter = CompileCounter()

    def layer(q: Any, shards: Shards) -> Any:
        return distributed.attention(q, q, q, group=mesh["cp"], shards=shards, causal=True)

    fast, error = torch.compile(layer, fullgraph=True, backend=counter), 0.0
    for documents in ([10, 30, 24], [20, 20, 24], [32, 32], [1, 2, 3, 58], [7] * 9 + [1], [64], [33, 30]):
        shards = Shards.zigzag(documents=documents, ranks=size)
        q = torch.randn(1, 3, shards.counts[rank], 8)  # heads that "auto" does not exchange
        error = max(error, float((fast(q, shards) - layer(q, shards)).abs().max()))
    return error, counter.frame_count


def test_other_documents_compile_nothing_anew(ranks: Ranks) -> None:
    if ranks.size > 2:
        pytest.skip("tried by two processes: each must import the compiler")
    for error, times in ranks.run(compiled_for_documents):
        assert error == 0 and times <= 3  # for these sizes, for any documents, and for any tokens


def disagreeing(rank: int, size: int, what: str) -> str:
    shards = Shards.zigzag(32, ranks=size)
    if what == "shards" and rank == 1:
        shards = Shards.contiguous(32, ranks=size)
    q = torch.randn(1, 4, shards.counts[rank], 8)
    options: dict[str, Any] = {"causal": what == "causal" and rank == 1}
    method = "ring" if what == "method" and rank == 1 else "gather"
    try:
        distributed.attention(q, q, q, group=dist.group.WORLD, shards=shards, method=method, **options)
    except ft.FlashtileError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusing(rank: int, size: int, what: str) -> str:
    wrong = what if rank == 1 else ""
    shards = Shards.zigzag(32, ranks=size)
    q = torch.randn(1, 4, shards.counts[rank] + (wrong == "tokens"), 8)
    k = q[:, :3] if wrong == "heads" else q
    options: dict[str, Any] = {"window": (-1, 0) if wrong == "window" else (3, 0)}
    try:
        distributed.attention(q, k, k, group=dist.group.WORLD, shards=shards, method="ring", **options)
    except ft.FlashtileError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("what", ["shards", "causal", "method"])
def test_ranks_that_disagree(ranks: Ranks, what: str) -> None:
    for text in ranks.run(disagreeing, what):
        assert "MismatchError" in text and what in text


@pytest.mark.parametrize("what", ["tokens", "window", "heads"])
def test_a_rank_that_refuses(ranks: Ranks, what: str) -> None:
    """It raises its error; the others say which rank refused, and why. The group can be used afterwards."""
    found = ranks.run(refusing, what)
    named = {"tokens": "q: expected", "window": "window: expected", "heads": "k: expected"}[what]
    for rank, text in enumerate(found):
        assert ("ShapeError" if rank == 1 else "MismatchError: ") in text and named in text, text
    run_cases(ranks, [("causal", "zigzag", "ring")])


def peaks(rank: int, size: int) -> list[float]:
    """The most memory that a forward and a backward pass of a ring take, in shards of k."""
    n = 256
    shards = Shards.zigzag(n * size, ranks=size)
    q, k, v = (torch.randn(1, 8, n, 64).requires_grad_() for _ in range(3))
    dout, outs = torch.randn(1, 8, n, 64), []

    def forward() -> None:
        group = dist.group.WORLD
        outs.append(distributed.attention(q, k, v, group=group, shards=shards, method="ring", causal=True))

    def backward() -> None:
        outs.pop().backward(dout)

    forward()  # once before, so that nothing is allocated for the first time
    backward()
    q.grad = k.grad = v.grad = None
    found = []
    for run in (forward, backward):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            run()
        events = [x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"]
        held = np.cumsum([x.nbytes() for x in sorted(events, key=lambda x: x.start_ns())])
        found.append(float(held.max()) / k.nbytes)
    return found


def test_memory_of_a_ring(ranks: Ranks) -> None:
    """It does not grow with the number of ranks. In shards of k, the results are 1 forward and 3 backward; beside them
    there are two blocks of keys and values and, backward, of their sums; a part of a block that leaves is a copy.
    """
    forward, backward = (max(x) for x in zip(*ranks.run(peaks), strict=True))
    results, partial, blocks, sums, leaving = 1, 1, 4, 4, 2
    assert forward <= results + partial + blocks + leaving + 0.3
    assert backward <= 3 * results + blocks + sums + leaving + 1 + 0.3


def dying(rank: int, size: int, method: str, at: str) -> str:
    """Rank 1 is killed when it sends at this step; what the others raise, and after how many seconds."""
    shards = Shards.zigzag(64, ranks=size)
    q = torch.randn(1, 4, shards.counts[rank], 8, requires_grad=True)
    send = Channel.transfer

    def transfer(self: Channel, sends: Any, receives: Any, step: str) -> Any:
        if rank == 1 and at in step:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, sends, receives, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "transfer", transfer)
        try:
            out = distributed.attention(q, q, q, group=dist.group.WORLD, shards=shards, method=method, causal=True)
            out.sum().backward()
        except PeerError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("ring", "backward, block 2"),
        *(
            pytest.param(method, at, marks=pytest.mark.slow)
            for method, steps in (
                ("ring", ("forward, block 1", "forward, block 2", "backward, block 1", "block 3 of 3, gradients")),
                ("gather", ("forward, keys", "backward, keys", "backward, gradients")),
                ("ulysses", ("forward, heads", "forward, rows", "backward, heads", "backward, rows")),
            )
            for at in steps
        ),
    ],
)
def test_a_rank_that_dies(method: str, at: str) -> None:
    with Ranks(3) as ranks:
        ranks.start(dying, method, at)
        for text in ranks.results(of=(0, 2)):
            assert isinstance(text, str) and "rank 1" in text and text.startswith(method), text
