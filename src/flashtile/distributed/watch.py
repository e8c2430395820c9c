"""Watch: threads beside a process group that notice at once when a peer dies, and ask peers that are late what they do."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections import deque
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist

from flashtile.distributed.connections import abort, connect, disconnect, timeout_of

MESSAGE_BYTES = 4096
MESSAGE, ALIVE = 1, 2  # tags: messages; and a receive that only ends when the peer does
FOREVER = timedelta(days=3650)
NOT_IN_A_CALL = "not in a call"


@dataclass(frozen=True)
class Failure:
    """Why a group cannot go on: the ranks at fault, what they did, and who noticed it at which step."""

    peers: tuple[int, ...]
    what: str
    noticed_by: int
    step: str

    def __str__(self) -> str:
        return f"{ranks(self.peers)} {self.what}; rank {self.noticed_by} noticed, {self.step}"


def ranks(numbers: Any) -> str:
    """Ranks as text: "rank 2", "ranks 0 and 3"."""
    names = [str(n) for n in sorted(numbers)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


class Watch:
    """One for each process group, on gloo connections of its own, so that it works for groups of any backend.

    Three threads wait in receives and cost nothing until something happens. Two of them wait for the neighbours in the
    ring of ranks, for a message that is never sent: the receive fails in the moment in which the neighbour's process
    ends. The third one takes messages from all ranks: a failure that another rank noticed, a question what this rank is
    doing, a goodbye. The first rank that notices a failure tells all others; every rank then closes the connections of
    the group, which ends whatever it is waiting for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout_of(group)
        self.patience = min(1.0, self.timeout / 5)  # how long a peer may take to answer
        self.state = NOT_IN_A_CALL
        self.failure: Failure | None = None
        self._group = weakref.ref(group)
        self._failed = threading.Event()
        self._closing = False
        self._lock = threading.RLock()
        self._sent: deque[Any] = deque(maxlen=4 * self.size)  # gloo forgets a message whose Work is gone
        self._left: set[int] = set()
        self._answers: dict[int, str] = {}
        self._answered = threading.Condition()
        self.connections = connect(group, self.rank, self.size, self.timeout)
        neighbours = {(self.rank - 1) % self.size, (self.rank + 1) % self.size}
        jobs: list[tuple[Any, tuple[int, ...]]] = [
            (self._listen, ()),
            *((self._wait_for_end, (n,)) for n in neighbours),
        ]
        self._threads = [
            threading.Thread(target=job, args=args, daemon=True, name="flashtile watch") for job, args in jobs
        ]
        for thread in self._threads:
            thread.start()
        self._at_exit = Finalize(None, self.close, exitpriority=10)  # children of multiprocessing run no atexit
        weakref.finalize(group, self.close)

    def close(self) -> None:
        """Say goodbye and end the threads."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._at_exit.cancel()
        if self.failure is None:
            self._tell("left")
            disconnect(self.connections)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self.patience)

    def fail(self, peers: tuple[int, ...], what: str) -> Failure:
        """Record a failure that this rank noticed, tell the other ranks, and end all waiting in the group."""
        return self._record(Failure(peers, what[:500], self.rank, self.state[:200]), tell=True)

    def cause(self, peer: int | None, error: BaseException) -> Failure:
        """Why a transfer failed: what was noticed meanwhile, or what the peers answer."""
        self._failed.wait(self.patience / 4)
        return self._diagnose(peer, f"closed the connection ({(str(error).splitlines() or [type(error).__name__])[0]})")

    def overdue(self, peer: int | None) -> Failure:
        """Why a transfer did not end in time: the ranks that do not answer, or what those that answer are doing."""
        return self._diagnose(peer, f"sent nothing for {self.timeout:g} s, the group's timeout")

    def _diagnose(self, peer: int | None, what: str) -> Failure:
        answers = self._ask()
        if self.failure is not None:
            return self.failure
        others = set(range(self.size)) - {self.rank}
        left, silent = others & self._left, others - set(answers)
        if left:
            return self.fail(tuple(left), "left the group")
        if silent:
            return self.fail(tuple(silent), "does not answer and " + what)
        states = "; ".join(f"rank {r}: {answers[r]}" for r in sorted(others))
        return self.fail(tuple(others) if peer is None else (peer,), f"{what}; all ranks answer ({states})")

    def _record(self, failure: Failure, tell: bool) -> Failure:
        with self._lock:
            if self.failure is not None or self._closing:
                return self.failure or failure
            self.failure = failure
        if tell:
            self._tell("failed", **asdict(failure))
        self._failed.set()
        with self._answered:
            self._answered.notify_all()
        group = self._group()
        if group is not None:
            abort(group)
        disconnect(self.connections)
        return failure

    def _tell(self, kind: str, **content: Any) -> None:
        """Send a message to all ranks; wait for those that take it, but not long."""
        works = [w for w in (self._send(r, kind, **content) for r in range(self.size) if r != self.rank) if w]
        end = time.monotonic() + self.patience / 4
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))

    def _send(self, peer: int, kind: str, **content: Any) -> Any:
        text = json.dumps({"kind": kind, **content}).encode()
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            work = self.connections.send([message], peer, MESSAGE)
            self._sent.append(work)
            return work
        return None

    def _ask(self) -> dict[int, str]:
        """What the other ranks are doing, of those that answer in time."""
        with self._answered:
            self._answers.clear()
        for peer in range(self.size):
            if peer != self.rank:
                self._send(peer, "what")
        with self._answered:
            self._answered.wait_for(lambda: len(self._answers) == self.size - 1 or self._failed.is_set(), self.patience)
            return dict(self._answers)

    def _listen(self) -> None:
        while True:
            message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
            try:
                work = self.connections.recv_anysource([message], MESSAGE)
                work.wait(FOREVER)
            except RuntimeError:
                return
            self._take(work._source_rank(), json.loads(message.numpy().tobytes().rstrip(b"\0")))

    def _take(self, source: int, content: dict[str, Any]) -> None:
        kind = content.pop("kind")
        if kind == "what":
            self._send(source, "state", state=self.state)
        elif kind == "state":
            with self._answered:
                self._answers[source] = content["state"]
                self._answered.notify_all()
        elif kind == "left":
            self._left.add(source)
        elif kind == "failed":
            self._record(Failure(**{**content, "peers": tuple(content["peers"])}), tell=False)

    def _wait_for_end(self, peer: int) -> None:
        with contextlib.suppress(RuntimeError):
            self.connections.recv([torch.empty(1, dtype=torch.uint8)], peer, ALIVE).wait(FOREVER)
        if not self._failed.wait(0.05) and not self._closing and peer not in self._left:
            self.fail((peer,), "died")
