"""A rank that dies, stops, leaves or fails at any step: every other rank gets an error in time that says so."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from flashtile.distributed.channel import Channel, Pending  # noqa: E402
from flashtile.errors import PeerError  # noqa: E402
from tests.support.processes import Error, Ranks  # noqa: E402

ROWS = 1 << 19  # 2 MB: more than the sockets hold, so that a transfer can be cut in the middle


@dataclass(frozen=True)
class Trial:
    """Which rank is struck by which signal, at which step, before or after it has started the transfers."""

    size: int
    victim: int
    how: signal.Signals
    step: str
    moment: str
    timeout: float

    def __str__(self) -> str:
        return f"{self.size}-{self.victim}-{self.how.name}-{self.step}-{self.moment}".replace(" ", "_")


@dataclass(frozen=True)
class Outcome:
    """How a rank fared: its error, if any, and what was left of the call afterwards."""

    error: str | None
    seconds: float  # from the strike to the error
    began: float  # from the strike to the beginning of the last wait
    again: str | None  # the error of a second call
    threads: list[str]
    alive: int  # tensors of the call that are still in memory
    destroying: float  # seconds


def steps_of(size: int) -> list[str]:
    """The names of the steps of a call that uses every verb."""
    return ["agree", *(f"rotate {i} of {size - 1}" for i in range(1, size)), "exchange", "gather", "reduce"]


def jobs_of(channel: Channel) -> dict[str, Callable[[torch.Tensor], Pending | None]]:
    """What is done at each step, with a check of what is received."""
    n, rank = channel.size, channel.rank
    shape = (ROWS,)

    def checked(pending: Pending, expected: Iterable[float]) -> Pending:
        def wait() -> list[torch.Tensor]:
            received = Pending.wait(pending)
            for x, value in zip(received, expected, strict=True):
                assert (x == value).all()
            return received

        pending.wait = wait  # type: ignore[method-assign]
        return pending

    def agree(x: torch.Tensor) -> None:
        channel.agree("agree", size=n)

    def rotate(step: int, x: torch.Tensor) -> Pending:
        name = f"rotate {step} of {n - 1}"
        return checked(channel.rotate([x + (rank - step + 1) % n], [shape], name), [(rank - step) % n])

    def exchange(x: torch.Tensor) -> Pending:
        return checked(channel.exchange([x + rank] * n, [shape] * n, "exchange"), range(n))

    def gather(x: torch.Tensor) -> Pending:
        return checked(channel.gather(x + rank, [shape] * n, "gather"), range(n))

    def reduce(x: torch.Tensor) -> None:
        assert (channel.reduce(x + rank, "sum", "reduce") == sum(range(n))).all()

    rotations = [lambda x, i=i: rotate(i, x) for i in range(1, n)]
    return dict(zip(steps_of(n), [agree, *rotations, exchange, gather, reduce], strict=True))


def call(channel: Channel, trial: Trial | None, mark: Path, began: list[float], tensors: list[Any]) -> None:
    """All steps; the victim strikes itself at its step."""

    def strike(name: str, moment: str) -> None:
        if trial is not None and (channel.rank, name, moment) == (trial.victim, trial.step, trial.moment):
            mark.write_text(str(time.monotonic()))
            os.kill(os.getpid(), trial.how)
            time.sleep(0.05)

    for name, step in jobs_of(channel).items():
        x = torch.zeros(ROWS)
        tensors.append(weakref.ref(x))
        strike(name, "before")
        began[:] = [time.monotonic()]
        pending = step(x)
        strike(name, "under way")
        if pending is not None:
            tensors += [weakref.ref(y) for y in pending.wait()]


def watched(rank: int, size: int, trial: Trial, mark: Path) -> Outcome:
    """Run the call and describe how it ended."""
    began: list[float] = []
    tensors: list[Any] = []
    error = again = None
    try:
        with Channel(dist.group.WORLD, "ring") as channel:
            dist.barrier()  # a rank that dies before all are connected is another test
            call(channel, trial, mark, began, tensors)
    except PeerError as e:
        error = str(e)
    end = time.monotonic()
    struck = float(mark.read_text())
    try:
        with Channel(dist.group.WORLD, "ring") as channel:
            channel.agree("second call")
    except PeerError as e:
        again = str(e)
    begin = time.monotonic()
    dist.destroy_process_group()
    destroying = time.monotonic() - begin
    del channel
    gc.collect()
    for _ in range(100):
        threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        if not threads:
            break
        time.sleep(0.01)
    alive = sum(t() is not None for t in tensors)
    return Outcome(error, end - struck, began[0] - struck, again, threads, alive, destroying)


def run(trial: Trial, folder: Path) -> list[Any]:
    """The outcomes of all ranks, None for one that died; a stopped one is continued once the others are done."""
    with Ranks(trial.size, trial.timeout) as ranks:
        ranks.start(watched, trial, folder / str(trial))
        others = [r for r in range(trial.size) if r != trial.victim]
        outcomes = dict(zip(others, ranks.results(others), strict=True))
        pid = ranks.processes[trial.victim].pid
        assert pid is not None
        if trial.how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        outcomes[trial.victim] = ranks.results([trial.victim])[0]
        return [outcomes[r] for r in range(trial.size)]


def trials(size: int, how: signal.Signals, timeout: float, victims: tuple[int, ...]) -> list[Trial]:
    """A trial for every step; transfers are also cut in the middle."""
    under_way = [f"rotate {max(1, size // 2)} of {size - 1}", "exchange", "gather"]
    strikes = [(step, "before") for step in steps_of(size)] + [(step, "under way") for step in under_way]
    return [
        Trial(size, victims[i % len(victims)], how, step, moment, timeout) for i, (step, moment) in enumerate(strikes)
    ]


KILLS = [*trials(2, signal.SIGKILL, 20, (0, 1)), *trials(4, signal.SIGKILL, 20, (0, 2, 3))]
KILLS_OF_EIGHT = trials(8, signal.SIGKILL, 20, (0, 3, 5))
STOPS = [*trials(2, signal.SIGSTOP, 2, (1, 0)), *trials(4, signal.SIGSTOP, 2, (2, 0, 1))]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Trial], list[Any]]:
    """The outcomes of each trial; stops, which are mostly waiting, run side by side."""
    folder = tmp_path_factory.mktemp("strikes")
    found: dict[Trial, list[Any]] = {}

    def outcomes(trial: Trial) -> list[Any]:
        if trial not in found:
            batch = [trial] if trial.how == signal.SIGKILL else STOPS
            with ThreadPoolExecutor(6) as pool:
                found.update(zip(batch, pool.map(lambda t: run(t, folder), batch), strict=True))
        return found[trial]

    return outcomes


def check(trial: Trial, outcomes: list[Any], within: float) -> None:
    """Every survivor has an error in time that names method, step and peer, or a right result if all was sent."""
    steps = steps_of(trial.size)
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, Error), outcome.trace
        if rank == trial.victim:
            continue
        assert outcome is not None, f"rank {rank} hangs"
        if trial.moment == "before":
            assert outcome.error is not None
        if outcome.error is not None:
            method, step, here, peer = outcome.error.split(" (noticed")[0].replace(": ", ", ").split(", ")[:4]
            assert method == "ring" and here == f"on rank {rank}" and peer.startswith(f"rank {trial.victim} ")
            # The victim's neighbours wait at its step; others can be as many steps away as there are ranks between.
            assert abs(steps.index(step.removeprefix("after ")) - steps.index(trial.step)) < trial.size
            assert outcome.seconds - max(0, outcome.began) <= within
            assert outcome.again is not None and f"rank {trial.victim} " in outcome.again
        assert outcome.threads == [] and outcome.alive == 0 and outcome.destroying < 1


@pytest.mark.parametrize("trial", KILLS, ids=str)
def test_a_rank_is_killed(trial: Trial, outcomes: Callable[[Trial], list[Any]]) -> None:
    """Rank 0 hosts the store of the group."""
    found = outcomes(trial)
    assert found[trial.victim] is None
    check(trial, found, within=1)
    for outcome in found:
        assert outcome is None or outcome.error is None or f"rank {trial.victim} died" in outcome.error


@pytest.mark.slow
@pytest.mark.parametrize("trial", KILLS_OF_EIGHT, ids=str)
def test_one_of_eight_is_killed(trial: Trial, outcomes: Callable[[Trial], list[Any]]) -> None:
    """Not every rank watches the victim: those that do tell the others."""
    check(trial, outcomes(trial), within=1)


@pytest.mark.parametrize("trial", STOPS, ids=str)
def test_a_rank_is_stopped(trial: Trial, outcomes: Callable[[Trial], list[Any]]) -> None:
    found = outcomes(trial)
    check(trial, found, within=trial.timeout)
    late = found[trial.victim]  # it was continued after the others had given up
    assert late.error is None or "closed the connection" in late.error or "died" in late.error or "left" in late.error
    assert late.threads == [] and late.alive == 0


def ring(channel: Channel) -> None:
    for step in range(1, channel.size):
        channel.rotate([torch.ones(3)], [(3,)], f"forward, ring step {step} of {channel.size - 1}").wait()


def caught(rank: int, job: Callable[[Channel], None]) -> tuple[str, float]:
    """The PeerError of a job, and when it was raised."""
    with pytest.raises(PeerError) as error, Channel(dist.group.WORLD, "ring") as channel:
        job(channel)
    return str(error.value), time.monotonic()


def fails(rank: int, size: int) -> Any:
    if rank != 1:
        return caught(rank, ring)
    with pytest.raises(MemoryError), Channel(dist.group.WORLD, "ring"):
        time.sleep(0.2)  # the others wait by now
        begin = time.monotonic()
        raise MemoryError("no room for dK")
    return begin


def reduces_what_gloo_cannot(rank: int, size: int, dtype: torch.dtype) -> Any:
    x = torch.ones(3).to(dtype if rank == 1 else torch.float32)
    try:
        with Channel(dist.group.WORLD, "ring") as channel:
            channel.reduce(x, "max", "largest lse")
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_an_error_of_one_rank(dtype: torch.dtype) -> None:
    """The others hear of it, and nobody else is blamed."""
    with Ranks(2) as ranks:
        ranks.start(reduces_what_gloo_cannot, dtype)
        (kind, text), (_, own_text) = ranks.results()
    assert kind == "PeerError" and "rank 1 failed: " in text
    assert own_text.split("failed: ")[-1].split(" (noticed")[0] in text


def leaves(rank: int, size: int) -> Any:
    if rank != 1:
        return caught(rank, ring)
    Channel(dist.group.WORLD, "ring")
    begin = time.monotonic()
    dist.destroy_process_group()
    gc.collect()
    return begin


def dies_in_two_groups(rank: int, size: int) -> Any:
    """Ranks 0 and 1 share a group for heads, 0 and 2 one for the ring: rank 2 hears of rank 1 by rank 0."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    text = None
    try:
        with Channel(mesh["ring"], "ring") as outer, Channel(mesh["ulysses"], "ulysses") as inner:
            dist.barrier()
            begin = time.monotonic()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                inner.gather(torch.ones(1), [(1,)] * 2, "gather").wait()
            outer.gather(torch.ones(1), [(1,)] * 2, "gather").wait()
    except PeerError as error:
        text = str(error)
    return text, time.monotonic() - begin


def forks_and_dies(rank: int, size: int, mark: Path) -> Any:
    """Its child, as a DataLoader has, lives on with the connections that it inherited."""
    if rank == 1:
        Channel(dist.group.WORLD, "ring")
        mark.write_text(str(time.monotonic()))
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
        os._exit(0)
    found = caught(rank, ring)
    return found, float(mark.read_text())


def dies_between_calls(rank: int, size: int) -> Any:
    with Channel(dist.group.WORLD, "ring") as channel:
        ring(channel)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    begin = time.monotonic()
    text, end = caught(rank, ring)
    return text, end - begin


def two_die(rank: int, size: int) -> Any:
    with Channel(dist.group.WORLD, "ring") as channel:
        ring(channel)
        begin = time.monotonic()
        if rank in (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
    text, end = caught(rank, ring)
    return text, end - begin


def dawdles(rank: int, size: int) -> Any:
    begin = time.monotonic()
    if rank == 1:
        Channel(dist.group.WORLD, "ring")
        time.sleep(2.5)
    text, end = caught(rank, ring)
    return text, end - begin


def dies_before_the_first_call(rank: int, size: int) -> Any:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    text, _ = caught(rank, ring)
    again, end = caught(rank, ring)
    assert again == text
    return text, end - begin


def does_not_come(rank: int, size: int) -> Any:
    if rank == 1:
        time.sleep(3)
        return None
    begin = time.monotonic()
    text, end = caught(rank, ring)
    return text, end - begin


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_rank_that_fails_tells_the_others(size: int) -> None:
    """Of 8 ranks, two hear of it from others only."""
    with Ranks(size) as ranks:
        ranks.start(fails)
        results = ranks.results()
    for rank in {*range(size)} - {1}:
        text, when = results[rank]
        assert text.startswith("ring, forward, ring step ")
        assert "rank 1 failed: MemoryError: no room for dK" in text and when - results[1] < 1


def test_a_rank_that_leaves() -> None:
    with Ranks(4) as ranks:
        ranks.start(leaves)
        results = ranks.results()
    for rank in (0, 2, 3):
        text, when = results[rank]
        assert "rank 1 left the group" in text and when - results[1] < 2


def test_a_failure_in_one_group_is_told_in_the_other() -> None:
    with Ranks(4) as ranks:
        ranks.start(dies_in_two_groups)
        results = ranks.results([0, 2, 3])
    for text, seconds in results:
        assert text is not None and seconds < 1
    assert "rank 0 failed: PeerError: ulysses, gather, on rank 0: rank 1 died" in results[1][0]


def test_a_rank_dies_whose_child_lives(tmp_path: Path) -> None:
    with Ranks(4) as ranks:
        ranks.start(forks_and_dies, tmp_path / "mark")
        results = ranks.results([0, 2, 3])
    for (text, when), begin in results:
        assert "rank 1 died" in text and when - begin < 1


@pytest.mark.parametrize("job", [dies_between_calls, two_die], ids=lambda job: job.__name__)
def test_deaths(job: Callable[..., Any]) -> None:
    with Ranks(4) as ranks:
        ranks.start(job)
        for result in ranks.results():
            if result is not None:
                text, seconds = result
                assert ("rank 1 died" in text or (job is two_die and "rank 2 died" in text)) and seconds < 1


def test_a_rank_that_is_late() -> None:
    """It is not stopped, and the others say where it is."""
    with Ranks(4, timeout=2) as ranks:
        ranks.start(dawdles)
        results = ranks.results()
    for rank in (0, 2, 3):
        text, seconds = results[rank]
        assert "was waited for in vain: 2 s, the group's timeout, are over" in text and seconds < 2
        assert "rank 1 is at: not in a call" in text


@pytest.mark.parametrize("job", [does_not_come, dies_before_the_first_call], ids=lambda job: job.__name__)
def test_a_rank_that_never_calls(job: Callable[..., Any]) -> None:
    with Ranks(4, timeout=2) as ranks:
        ranks.start(job)
        results = ranks.results()
    for rank in (0, 2, 3):
        text, seconds = results[rank]
        assert "missing: 1" in text and seconds < 3


SCRIPT = """
import torch, torch.distributed as dist, sys
from flashtile.distributed.channel import Channel
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", rank=int(sys.argv[2]), world_size=2, store=store)
with Channel(dist.group.WORLD, "ring") as channel:
    channel.agree("forward", a=1)
    assert channel.rotate([torch.ones(3)], [(3,)], "step").wait()[0].tolist() == [1, 1, 1]
"""


def test_scripts_that_end_without_destroying_the_group(tmp_path: Path) -> None:
    """No hang, no crash, nothing printed."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "store")]
    processes = [subprocess.Popen([*command, str(r)], stderr=subprocess.PIPE, text=True) for r in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and errors == ""
