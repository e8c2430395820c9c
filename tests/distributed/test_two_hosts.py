"""Two hosts with a slow, lossy link between them: right results, or an error in time. Needs root."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from flashtile.distributed.channel import Channel  # noqa: E402
from flashtile.errors import PeerError  # noqa: E402
from tests.support.link import Link  # noqa: E402
from tests.support.processes import Ranks  # noqa: E402

pytestmark = pytest.mark.slow
ROWS = 1 << 16  # 256 KB: some 200 packets


@pytest.fixture
def link() -> Iterator[Link]:
    """20 ms there and back, 5 MB/s, and one packet of fifty lost."""
    try:
        link = Link(seconds=0.01, bytes_per_second=5e6, loss=0.02)
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield link
    link.close()


def every_verb(channel: Channel) -> None:
    n, rank = channel.size, channel.rank
    channel.agree("forward", rows=ROWS)
    x = torch.full((ROWS,), float(rank))
    for step in range(1, n):
        (x,) = channel.rotate([x], [(ROWS,)], f"forward, ring step {step} of {n - 1}").wait()
        assert (x == (rank - step) % n).all()
    mine = torch.full((ROWS,), float(rank))
    for received in (
        channel.exchange([mine] * n, [(ROWS,)] * n, "exchange"),
        channel.gather(mine, [(ROWS,)] * n, "gather"),
    ):
        for source, y in enumerate(received.wait()):
            assert (y == source).all()
    assert (channel.reduce(mine, "sum", "reduce") == sum(range(n))).all()


def until_it_ends(rank: int, size: int, rounds: int) -> Any:
    """Every verb, again and again: the error, and when it was raised."""
    try:
        with Channel(dist.group.WORLD, "ring") as channel:
            for _ in range(rounds):
                every_verb(channel)
    except PeerError as error:
        return str(error), time.monotonic()
    return None


def dies_in_time(rank: int, size: int, mark: Path) -> Any:
    if rank == 3:
        with Channel(dist.group.WORLD, "ring") as channel:
            every_verb(channel)
            mark.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
    return until_it_ends(rank, size, 1000)


def test_right_over_a_bad_link(link: Link) -> None:
    with Ranks(4, timeout=60, hosts=link.hosts) as ranks:
        assert ranks.run(until_it_ends, 2) == [None] * 4
    assert link.lost > 10


def test_a_link_is_cut(link: Link) -> None:
    """Each host says that the ranks of the other one do not answer, within the group's timeout."""
    with Ranks(4, timeout=4, hosts=link.hosts) as ranks:
        ranks.start(until_it_ends, 1000)
        time.sleep(3)
        begin = time.monotonic()
        link.cut()
        results = ranks.results()
    for rank, (text, end) in enumerate(results):
        gone = "ranks 2 and 3" if rank < 2 else "ranks 0 and 1"
        assert f"on rank {rank}: {gone} gave no answer" in text and end - begin < 4 + 0.5


def test_a_rank_on_the_other_host_dies(link: Link, tmp_path: Path) -> None:
    with Ranks(4, timeout=30, hosts=link.hosts) as ranks:
        ranks.start(dies_in_time, tmp_path / "mark")
        results = ranks.results([0, 1, 2])
    died = float((tmp_path / "mark").read_text())
    for text, end in results:
        assert "rank 3 died" in text and end - died < 1
