"""LocalChannel: a Channel whose ranks are threads of one process, to simulate many and count what they send."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flashtile.distributed.channel import Channel, Transfer
from flashtile.errors import PeerError

T = TypeVar("T")


class Mailboxes:
    """What the threads of a simulation share: a queue for each pair of ranks, and the first error of any rank."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.boxes: dict[tuple[int, int], queue.Queue[Any]] = {
            (source, to): queue.Queue() for source in range(size) for to in range(size)
        }
        self.failure: tuple[int, BaseException] | None = None
        self._lock = threading.Lock()

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first error, and wake every rank that waits."""
        with self._lock:
            self.failure = self.failure or (rank, error)
        for box in self.boxes.values():
            box.put(None)


class LocalChannel(Channel):
    """The verbs of Channel between threads; local_ranks() makes one for each."""

    def __init__(self, mailboxes: Mailboxes, rank: int, method: str) -> None:
        self.method, self.rank, self.size = method, rank, mailboxes.size
        self.bytes_sent = 0
        self._mailboxes = mailboxes
        self._buffers = {}
        self._watch = None
        self._at = ""

    def _state(self, state: str) -> None:
        self._at = state

    def _post(self, sends: list[Transfer], receives: list[Transfer]) -> list[Transfer]:
        for peer, x in sends:
            self._put(peer, x.clone())  # the sender may overwrite x once its own wait has ended
        return receives

    def _finish(self, posted: list[Transfer]) -> None:
        for peer, x in posted:
            x.copy_(self._get(peer))

    def _all_reduce(self, x: torch.Tensor, op: str) -> None:
        parts = torch.stack(self._gather_all(x.clone()))
        x.copy_(parts.sum(0) if op == "sum" else parts.amax(0))

    def _same(self, digest: int) -> bool:
        return len(set(self._gather_all(digest))) == 1

    def _gather_texts(self, text: dict[str, str]) -> list[dict[str, str]]:
        return self._gather_all(text)

    def _give_up(self, error: BaseException) -> None:
        self._mailboxes.fail(self.rank, error)

    def _gather_all(self, item: T) -> list[T]:
        for peer in range(self.size):
            self._put(peer, item)
        return [self._get(peer) for peer in range(self.size)]

    def _put(self, peer: int, item: Any) -> None:
        self._mailboxes.boxes[self.rank, peer].put(item)

    def _get(self, peer: int) -> Any:
        try:
            item = self._mailboxes.boxes[peer, self.rank].get(timeout=self._mailboxes.timeout)
        except queue.Empty:
            message = f"{self._at}, on rank {self.rank}: rank {peer} sent nothing for {self._mailboxes.timeout:g} s"
            raise PeerError(message, (peer,)) from None
        if self._mailboxes.failure is not None:
            failed, error = self._mailboxes.failure
            message = f"{self._at}, on rank {self.rank}: rank {failed} failed: {type(error).__name__}: {error}"
            raise PeerError(message, (failed,)) from error
        return item


def local_ranks(size: int, method: str, job: Callable[[LocalChannel], T], timeout: float = 60) -> list[T]:
    """The results of job(channel) on every rank, each a thread; the error of the first rank that failed, if any did."""
    mailboxes = Mailboxes(size, timeout)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            with LocalChannel(mailboxes, rank, method) as channel:
                results[rank] = job(channel)
        except BaseException as error:
            mailboxes.fail(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if mailboxes.failure is not None:
        raise mailboxes.failure[1]
    return [results[rank] for rank in range(size)]
