"""Watch: threads beside a process group that notice at once when a peer dies, and ask late peers what they do."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Set
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist

from flashtile.distributed.connections import abort, connect, disconnect, timeout_of

MESSAGE_BYTES = 4096
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
        return f"{ranks(self.peers)} {self.what} (noticed by rank {self.noticed_by}, {self.step})"


def ranks(numbers: Any) -> str:
    """Ranks as text: "rank 2", "ranks 0 and 3"."""
    names = [str(n) for n in sorted(numbers)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


class Watch:
    """One for each process group, on gloo connections of its own, so that it works for groups of any backend.

    A rank watches those at distances 1, 2, 4, ... before and after it, with a thread for each that waits for messages
    and costs nothing until one comes, or until the receive fails, in the moment in which that process ends. Messages
    go to all watched ranks, and each rank passes on what it has not seen, so that they reach everybody around ranks
    that are dead. The first rank that notices a failure sends one; every rank then closes the connections of the group,
    which ends whatever it is waiting for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout_of(group)
        self.patience = min(1.0, self.timeout / 5)  # how long a peer may take to answer
        self.state = NOT_IN_A_CALL
        self.failure: Failure | None = None
        self._group = weakref.ref(group)
        self._failed = threading.Event()
        self._closing, self._process = False, os.getpid()
        self._lock = threading.RLock()
        self._sent: deque[Any] = deque(maxlen=32 * self.size)  # gloo forgets a message whose Work is gone
        self._left: set[int] = set()
        self._seen: set[tuple[int, int]] = set()
        self._messages = itertools.count()
        self._answers: dict[int, str] = {}
        self._answered = threading.Condition()
        self.connections = connect(group, self.rank, self.size, self.timeout)
        distances = [2**i for i in range((self.size - 1).bit_length())]
        self._watched = {(self.rank + sign * d) % self.size for d in distances for sign in (1, -1)} - {self.rank}
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True, name="flashtile watch")
            for peer in self._watched
        ]
        for thread in self._threads:
            thread.start()
        self._at_exit = Finalize(None, self.close, exitpriority=10)  # children of multiprocessing run no atexit
        weakref.finalize(group, self.close)

    def close(self) -> None:
        """Say goodbye and end the threads."""
        with self._lock:
            if self._closing or os.getpid() != self._process:  # a forked child has no part in the group
                return
            self._closing = True
        self._at_exit.cancel()
        if self.failure is None:
            self._flush(self._tell("left"))
            disconnect(self.connections)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self.patience)

    def fail(self, peers: tuple[int, ...], what: str) -> Failure:
        """Record a failure that this rank noticed, tell the other ranks, and end all waiting in the group."""
        if self.failure is not None:
            return self.failure
        failure = Failure(peers[:50], what[:250], self.rank, self.state[:200])  # must fit a message
        return self._record(failure, self._tell("failed", set(peers), **asdict(failure)))

    def noticed(self, patience: float | None = None) -> Failure | None:
        """What is known, or soon will be, to be wrong with other ranks."""
        self._failed.wait(self.patience / 4 if patience is None else patience)
        if self.failure is None and self._left:
            return self.fail(tuple(self._left), "left the group")
        return self.failure

    def cause(self, error: BaseException) -> Failure:
        """Why a transfer failed: what others noticed, ranks that do not answer, or else an error of this rank."""
        failure = self.noticed() or self._silent("a connection to it broke")
        return failure or self.fail((self.rank,), f"failed: {type(error).__name__}: {error}")

    def overdue(self, peer: int | None) -> Failure:
        """Why a transfer did not end in time: ranks that do not answer, or what those that answer are doing."""
        waited = f"{self.timeout:g} s, the group's timeout, are over"
        if failure := self._silent(waited):
            return failure
        states = "; ".join(f"rank {r} is at: {state}" for r, state in sorted(self._answers.items()))
        late = tuple(self._answers) if peer is None else (peer,)
        return self.fail(late, f"was waited for in vain: {waited}; {states}")

    def _silent(self, what: str) -> Failure | None:
        """A failure that is known, or that some ranks do not answer."""
        silent = set(range(self.size)) - {self.rank} - set(self._ask())
        failure = self.noticed(patience=0)
        return self.fail(tuple(silent), f"gave no answer: {what}") if failure is None and silent else failure

    def _record(self, failure: Failure, works: list[Any]) -> Failure:
        """Keep the first failure, flush the messages about it, and end all waiting in the group."""
        with self._lock:
            if self.failure is not None or self._closing:
                return self.failure or failure
            self.failure = failure
        self._flush(works)
        self._failed.set()
        with self._answered:
            self._answered.notify_all()
        group = self._group()
        if group is not None:
            abort(group)
        disconnect(self.connections)
        return failure

    def _ask(self) -> dict[int, str]:
        """What the other ranks are doing, of those that answer in time."""
        with self._answered:
            self._answers.clear()
        self._tell("what")
        with self._answered:
            self._answered.wait_for(self._heard_from_all, self.patience)
            return dict(self._answers)

    def _heard_from_all(self) -> bool:
        return self.failure is not None or len(self._left | set(self._answers)) == self.size - 1

    def _tell(self, kind: str, but: Set[int] = frozenset(), **content: Any) -> list[Any]:
        """Send a message to all ranks but some, which would not take it."""
        message = {"origin": self.rank, "number": next(self._messages), "kind": kind, **content}
        self._seen.add((self.rank, message["number"]))
        return self._pass_on(message, self._watched - but)

    def _pass_on(self, message: dict[str, Any], peers: Set[int]) -> list[Any]:
        data = json.dumps(message).encode().ljust(MESSAGE_BYTES, b"\0")
        works = []
        for peer in peers:
            with contextlib.suppress(RuntimeError):
                works.append(self.connections.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], peer, 0))
        self._sent.extend(works)
        return works

    def _flush(self, works: list[Any]) -> None:
        """Wait until messages are on their way, but not long: the connections are closed next."""
        end = time.monotonic() + self.patience / 2
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))

    def _listen(self, peer: int) -> None:
        while True:
            message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
            try:
                self.connections.recv([message], peer, 0).wait(FOREVER)
            except RuntimeError:
                break
            self._take(json.loads(message.numpy().tobytes().rstrip(b"\0")), peer)
        if not self._failed.wait(0.05) and not self._closing and peer not in self._left:  # a reason may be under way
            self.fail((peer,), "died")

    def _take(self, message: dict[str, Any], source: int) -> None:
        """Act on a message that has not been seen, and pass it on."""
        name = (message["origin"], message["number"])
        with self._lock:
            if name in self._seen:
                return
            self._seen.add(name)
        works = self._pass_on(message, self._watched - {source, *message.get("peers", ())})
        kind, origin = message["kind"], message["origin"]
        if kind == "what":
            self._tell("state", state=self.state)
        elif kind == "state":
            with self._answered:
                self._answers[origin] = message["state"]
                self._answered.notify_all()
        elif kind == "left":
            self._left.add(origin)
        elif kind == "failed":
            content = {f.name: message[f.name] for f in fields(Failure)}
            self._record(Failure(**{**content, "peers": tuple(content["peers"])}), works)
