"""Processes with a gloo group: every rank runs a function of the tests, and its result or error comes back."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.link import Host

# Forked from a process that has imported what the ranks need and started no threads, so that they start quickly.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed", "flashtile.distributed.channel", "hypothesis", "pytest"])


@dataclass(frozen=True)
class Error:
    """An error of a rank."""

    kind: str
    text: str
    trace: str


class Ranks:
    """Processes of one group; use in a with statement."""

    def __init__(self, size: int, timeout: float = 30, hosts: Sequence[Host] = ()) -> None:
        """Ranks on this host, or an equal number on each of `hosts`, in order."""
        self.size = size
        places = [hosts[rank * len(hosts) // size] if hosts else None for rank in range(size)]
        address = hosts[0].address if hosts else "127.0.0.1"
        pipes = [context.Pipe() for _ in range(size)]
        self.pipes = [here for here, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(there, rank, size, places[rank], address, timeout), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, there in pipes:
            there.close()
        port = self.pipes[0].recv()
        for pipe in self.pipes[1:]:
            pipe.send(port)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()  # also ends a stopped process
            process.join()

    def start(self, job: Callable[..., Any], *args: Any) -> None:
        """Call job(rank, size, *args) on every rank."""
        for pipe in self.pipes:
            pipe.send((job, args))

    def results(self, of: Iterable[int] | None = None, patience: float = 60) -> list[Any]:
        """What ranks returned: an Error where the job raised, None where the process is dead or says nothing."""
        results: dict[int, Any] = dict.fromkeys(range(self.size) if of is None else of)
        waiting = {self.pipes[rank]: rank for rank in results}
        while waiting and (ready := wait(list(waiting), patience)):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    results[rank] = pipe.recv()
        return list(results.values())

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Call job(rank, size, *args) on every rank; the results, if no rank failed."""
        self.start(job, *args)
        results = self.results()
        for rank, result in enumerate(results):
            assert not isinstance(result, Error), f"rank {rank}: {result.trace}"
        return results


def serve(pipe: Connection, rank: int, size: int, place: Host | None, address: str, timeout: float) -> None:
    """Join the group, then run jobs until the pipe is closed."""
    if place is not None:
        place.enter()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    # The store waits longer: it is used to meet, and what is tested comes after that.
    patience = datetime.timedelta(seconds=60)
    port = 0 if rank == 0 else pipe.recv()  # the system knows a free one
    store = dist.TCPStore(address, port, size, rank == 0, patience, wait_for_workers=False)
    if rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=limit)
    while True:
        try:
            job, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            result = job(rank, size, *args)
        except BaseException as error:
            result = Error(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)
    if dist.is_initialized():
        dist.destroy_process_group()
