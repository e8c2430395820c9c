"""Every verb between 2 and 4 gloo processes and between threads: values, uneven sizes, bytes, disagreement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from flashtile.distributed.channel import Channel  # noqa: E402
from flashtile.distributed.local_channel import LocalChannel, local_ranks  # noqa: E402
from flashtile.errors import DTypeError, MismatchError, PeerError, ShapeError  # noqa: E402
from tests.support.processes import Error, Ranks  # noqa: E402

Job = Callable[[Channel], Any]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


def on_gloo(rank: int, size: int, job: Job) -> Any:
    with Channel(dist.group.WORLD, "ring") as channel:
        return job(channel)


def everywhere(ranks: Ranks, job: Job) -> None:
    """Run a job on gloo processes and on threads: same results."""
    assert ranks.run(on_gloo, job) == local_ranks(ranks.size, "ring", job)


def block(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(rows * 3).reshape(rows, 3) + 100 * rank).to(dtype)


def rotate_all(channel: Channel) -> int:
    """Blocks of rank + 1 rows go around; those of rank 0 are empty on every second step."""
    keys, values = block(channel.rank, channel.rank + 1), block(channel.rank, 2, torch.bfloat16)
    for step in range(1, channel.size):
        source = (channel.rank - step) % channel.size
        text = f"forward, ring step {step} of {channel.size - 1}"
        keys, values = channel.rotate([keys, values], [(source + 1, 3), (2, 3)], text).wait()
        assert torch.equal(keys, block(source, source + 1)) and torch.equal(values, block(source, 2, torch.bfloat16))
    return channel.bytes_sent


def test_rotate(ranks: Ranks) -> None:
    """Each rank sends every block but the next rank's."""
    everywhere(ranks, rotate_all)
    sent = ranks.run(on_gloo, rotate_all)
    for rank in range(ranks.size):
        rows = [(rank - step) % ranks.size + 1 for step in range(ranks.size - 1)]
        assert sent[rank] == sum(12 * n for n in rows) + 12 * (ranks.size - 1)


def rotate_without_some(channel: Channel) -> int:
    """Nobody needs the block of rank 0, so that it is not sent."""
    x = block(channel.rank, 2 * (channel.rank > 0))
    for step in range(1, channel.size):
        source = (channel.rank - step) % channel.size
        (x,) = channel.rotate([x], [(2 * (source > 0), 3)], f"step {step}").wait()
        assert torch.equal(x, block(source, 2 * (source > 0)))
    return channel.bytes_sent


def test_rotate_sends_no_empty_block(ranks: Ranks) -> None:
    everywhere(ranks, rotate_without_some)
    assert ranks.run(on_gloo, rotate_without_some)[0] == 24 * (ranks.size - 2)


def buffers_of_rotate(channel: Channel) -> int:
    """How many places in memory many rotations receive in; the previous block is intact while the next one arrives."""
    x, places = block(channel.rank, 4), set()
    for step in range(1, 3 * channel.size):
        before, kept = x, x.clone()
        pending = channel.rotate([x], [(4, 3)], f"step {step}")
        assert torch.equal(before, kept)
        (x,) = pending.wait()
        assert torch.equal(before, kept)
        assert torch.equal(x, block((channel.rank - step) % channel.size, 4))
        places.add(x.data_ptr())
    return len(places)


def test_rotate_uses_two_buffers(ranks: Ranks) -> None:
    everywhere(ranks, buffers_of_rotate)
    assert ranks.run(on_gloo, buffers_of_rotate) == [2] * ranks.size


def arrives_meanwhile(rank: int, size: int) -> None:
    with Channel(dist.group.WORLD, "ring") as channel:
        channel.rotate([torch.zeros(1 << 20)], [(1 << 20,)], "clears the buffer").wait()
        channel.rotate([torch.zeros(1 << 20)], [(1 << 20,)], "clears the other buffer").wait()
        pending = channel.rotate([torch.ones(1 << 20)], [(1 << 20,)], "step")
        end = time.monotonic() + 20
        while not pending._received[0].all():
            assert time.monotonic() < end
        pending.wait()


def test_blocks_arrive_while_a_rank_computes(ranks: Ranks) -> None:
    """Without wait()."""
    ranks.run(arrives_meanwhile)


def two_lanes(channel: Channel) -> None:
    """Gradients follow their keys one step behind; both are under way at once."""
    keys, sums = block(channel.rank, 2), torch.zeros(2, 3, dtype=torch.float64)
    pending = None
    for step in range(1, channel.size + 1):
        coming = channel.rotate([keys], [(2, 3)], f"keys, step {step}", lane="keys")
        if pending is not None:
            (sums,) = pending.wait()
        sums += channel.rank + 1
        pending = channel.rotate([sums], [(2, 3)], f"gradients, step {step}", lane="gradients")
        (keys,) = coming.wait()
    assert pending is not None
    (sums,) = pending.wait()
    assert torch.equal(keys, block(channel.rank, 2))
    assert (sums == sum(range(1, channel.size + 1))).all()


def test_rotate_in_two_lanes(ranks: Ranks) -> None:
    everywhere(ranks, two_lanes)


def exchange_uneven(channel: Channel) -> int:
    """Rank a sends a * b rows to rank b: none from or to rank 0."""
    parts = [block(10 * channel.rank + to, channel.rank * to) for to in range(channel.size)]
    received = channel.exchange(
        parts, [(source * channel.rank, 3) for source in range(channel.size)], "exchange"
    ).wait()
    for source, x in enumerate(received):
        assert torch.equal(x, block(10 * source + channel.rank, source * channel.rank))
    return channel.bytes_sent


def test_exchange(ranks: Ranks) -> None:
    everywhere(ranks, exchange_uneven)
    sent = ranks.run(on_gloo, exchange_uneven)
    assert sent == [12 * sum(a * b for b in range(ranks.size) if b != a) for a in range(ranks.size)]


def gather_uneven(channel: Channel) -> int:
    shapes = [(source, 3) for source in range(channel.size)]
    transposed = block(channel.rank, channel.rank).T.contiguous().T  # a layout that has to be copied
    for source, x in enumerate(channel.gather(transposed, shapes, "gather").wait()):
        assert torch.equal(x, block(source, source))
    return channel.bytes_sent


def test_gather(ranks: Ranks) -> None:
    everywhere(ranks, gather_uneven)
    assert ranks.run(on_gloo, gather_uneven) == [12 * r * (ranks.size - 1) for r in range(ranks.size)]


def reduce_both(channel: Channel) -> int:
    total = channel.reduce(torch.tensor([1.0, channel.rank, -5.0, 0.5]), "sum", "sum of partials")
    assert total.tolist() == [channel.size, sum(range(channel.size)), -5.0 * channel.size, 0.5 * channel.size]
    most = channel.reduce(torch.tensor([1.0, channel.rank]), "max", "largest lse")
    assert most.tolist() == [1, channel.size - 1]
    assert channel.reduce(torch.empty(0), "sum", "nothing").shape == (0,)
    return channel.bytes_sent


def test_reduce(ranks: Ranks) -> None:
    everywhere(ranks, reduce_both)
    n = ranks.size
    assert ranks.run(on_gloo, reduce_both) == [2 * (n - 1) * 16 // n + 2 * (n - 1) * 8 // n] * n


def every_dtype(channel: Channel) -> None:
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
    for dtype in dtypes:
        mine, before = (torch.full((3,), float(r % channel.size)).to(dtype) for r in (channel.rank, channel.rank - 1))
        (x,) = channel.rotate([mine], [(3,)], f"{dtype}").wait()
        assert x.dtype == dtype and x.tolist() == before.tolist()


def strided_sum(channel: Channel) -> None:
    x = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(channel.reduce(x, "sum", "reduce"), channel.size * torch.arange(6.0).reshape(2, 3).T)


def other_default_device(channel: Channel) -> None:
    with torch.device("meta"):
        channel.agree("forward", a=1)
        with pytest.raises(MismatchError, match="a is 0 on rank 0"):
            channel.agree("forward", a=channel.rank)
    channel.agree("forward", a=1)


def needs_gradients(channel: Channel) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    (y,) = channel.rotate([x], [(2, 2)], "forward").wait()
    assert not y.requires_grad


# What one rank calls otherwise than the others, and what the error of every rank says about it.
FACTS = {"dtype": torch.float32, "shape": (1, 2, 3), "options": "{'causal': True}"}
DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.bfloat16}, "dtype is torch.float32 on rank"),
    ({"shape": (1, 2, 4)}, "(1, 2, 4) on rank 1"),
    ({"step": "backward"}, "step is 'forward' on rank"),
    ({"window": 5}, "window is missing on rank"),
    ({"options": "x" * 9000 + "y", "shape": ()}, "options is "),
    ({"refused": ValueError("q has no rows")}, "rank 1 refused the call: ValueError: q has no rows"),
]


def disagree(channel: Channel, number: int) -> str:
    change, _ = DIFFERENCES[number]
    call = {"step": "forward", **FACTS, **(change if channel.rank == 1 else {})}
    with pytest.raises((MismatchError, ValueError)) as caught:
        channel.agree(**call)
    channel.agree("again", **FACTS)  # the group is as it was
    assert channel.bytes_sent == 0
    return f"{type(caught.value).__name__}: {caught.value}"


def on_gloo_numbered(rank: int, size: int, job: Callable[[Channel, int], Any], number: int) -> Any:
    with Channel(dist.group.WORLD, "ring") as channel:
        return job(channel, number)


@pytest.mark.parametrize("number", range(len(DIFFERENCES)))
def test_every_rank_says_what_differs(ranks: Ranks, number: int) -> None:
    texts = ranks.run(on_gloo_numbered, disagree, number)
    assert texts == local_ranks(ranks.size, "ring", lambda channel: disagree(channel, number))
    change, says = DIFFERENCES[number]
    for rank, text in enumerate(texts):
        if "refused" in change and rank == 1:
            assert text == "ValueError: q has no rows"
        else:
            assert text.startswith("MismatchError: ring, ") and says in text and f"on rank {rank}:" in text


def other_method(rank: int, size: int) -> None:
    with Channel(dist.group.WORLD, "ring" if rank else "ulysses") as channel:
        channel.agree("forward", **FACTS)


def test_other_methods_disagree(ranks: Ranks) -> None:
    ranks.start(other_method)
    for error in ranks.results():
        assert isinstance(error, Error) and error.kind == "MismatchError"
        assert "method is 'ulysses' on rank 0, 'ring' on rank" in error.text


@pytest.mark.parametrize(
    "job", [every_dtype, strided_sum, other_default_device, needs_gradients], ids=lambda job: job.__name__
)
def test_more(ranks: Ranks, job: Job) -> None:
    everywhere(ranks, job)


def refuses(rank: int, size: int) -> None:
    """The errors leave the with statement; the group stays usable."""
    error = ShapeError("q has no rows") if rank == 1 else None
    with (
        pytest.raises((ShapeError, MismatchError), match="q has no rows"),
        Channel(dist.group.WORLD, "ring") as channel,
    ):
        channel.agree("forward", refused=error)
    with pytest.raises(MismatchError, match="rows is"), Channel(dist.group.WORLD, "ring") as channel:
        channel.agree("forward", rows=rank)
    with Channel(dist.group.WORLD, "ring") as channel:
        rotate_all(channel)


def test_a_group_is_usable_after_a_refusal(ranks: Ranks) -> None:
    ranks.run(refuses)


def wrong_arguments(channel: Channel) -> None:
    with pytest.raises(ShapeError, match="step 1: 1 tensors are sent, but 0 shapes"):
        channel.rotate([torch.ones(1)], [], "step 1")
    with pytest.raises(ShapeError, match="parts must have one item for each rank"):
        channel.exchange([torch.ones(1)], [(1,)] * channel.size, "exchange")
    with pytest.raises(ShapeError, match="shapes must have one item for each rank"):
        channel.gather(torch.ones(1), [], "gather")
    with pytest.raises(ShapeError, match='op must be "sum" or "max"'):
        channel.reduce(torch.ones(1), "mean", "reduce")


def test_wrong_arguments(ranks: Ranks) -> None:
    everywhere(ranks, wrong_arguments)


def groups(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    with Channel(mesh["cp"], "ring") as channel:
        assert (channel.rank, channel.size) == (rank % 2, 2)
        channel.agree("forward", row=rank // 2)
        rotate_all(channel)
    with pytest.raises(ShapeError, match="one dimension"):
        Channel(mesh, "ring")
    with pytest.raises(DTypeError, match="ProcessGroup or a DeviceMesh, got int"):
        Channel(3, "ring")
    alone = dist.new_group([rank], use_local_synchronization=True)
    with Channel(alone, "ring") as channel:
        channel.agree("forward", rank=rank)
        assert channel.rotate([torch.ones(2)], [(2,)], "step").wait()[0].tolist() == [1, 1]
        assert channel.gather(torch.ones(2), [(2,)], "gather").wait()[0].tolist() == [1, 1]
        assert channel.reduce(torch.ones(2), "sum", "reduce").tolist() == [1, 1]
        assert channel.bytes_sent == 0


def test_meshes_and_groups(ranks: Ranks) -> None:
    ranks.run(groups)


@pytest.mark.parametrize("size", [3, 8, 32])
def test_many_threads(size: int) -> None:
    for job in (rotate_all, rotate_without_some, two_lanes, exchange_uneven, gather_uneven, reduce_both):
        local_ranks(size, "ring", job)


def test_a_thread_that_fails() -> None:
    """The others stop waiting, and the first error is raised."""
    errors = []

    def job(channel: LocalChannel) -> None:
        if channel.rank == 2:
            raise KeyError("lost")
        try:
            rotate_all(channel)
        except PeerError as error:
            errors.append(str(error))
            raise

    with pytest.raises(KeyError, match="lost"):
        local_ranks(4, "ring", job)
    assert len(errors) == 3 and all("rank 2 failed: KeyError: 'lost'" in e and "ring step" in e for e in errors)


def test_a_thread_that_does_not_come() -> None:
    with pytest.raises(PeerError, match=r"rank [01] sent nothing for 0.2 s"):
        local_ranks(2, "ring", lambda c: rotate_all(c) if c.rank else None, timeout=0.2)


@pytest.mark.slow
def test_eight_processes() -> None:
    with Ranks(8) as ranks:
        for job in (rotate_all, rotate_without_some, two_lanes, exchange_uneven, gather_uneven, reduce_both):
            everywhere(ranks, job)
