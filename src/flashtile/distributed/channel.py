"""Channel: the ranks of a process group send tensors to each other; whatever goes wrong names the step and the peer."""

from __future__ import annotations

import hashlib
import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flashtile.distributed.connections import device_of
from flashtile.distributed.watch import NOT_IN_A_CALL, Failure, Watch, ranks
from flashtile.errors import DTypeError, MismatchError, PeerError, ShapeError

TEXT_BYTES = 16384
C = TypeVar("C", bound="Channel")
Shape = Sequence[int]
Transfer = tuple[int, torch.Tensor]  # a peer, and what it gets or gives

_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch | PeerError] = weakref.WeakKeyDictionary()


class Pending:
    """Transfers under way; wait() ends them and gives the tensors received."""

    def __init__(self, finish: Callable[[], None], received: list[torch.Tensor], keep: object = None) -> None:
        self._finish: Callable[[], None] | None = finish
        self._received = received
        self._keep = keep  # what is being sent must stay in memory

    def wait(self) -> list[torch.Tensor]:
        """The tensors received, once everything has arrived and everything sent may be overwritten."""
        if self._finish is not None:
            self._finish()
            self._finish = self._keep = None
        return self._received


class Channel:
    """What the ranks of a group send to each other during one call of a method; use it in a with statement.

    `group` is a ProcessGroup or a 1-D DeviceMesh, `method` the name that errors give. Peers are ranks within the group.
    Making the first Channel of a group is collective, as its Watch connects the ranks. Every call starts with agree().

    Verbs take a `step`, text such as "forward, ring step 3 of 7", for errors. A tensor without elements is not sent,
    and a shape without elements is not waited for: sender and receiver must agree on which ones, from facts that
    agree() has compared. `bytes_sent` counts the payload that left this rank; for reduce(), what a ring all-reduce
    sends.

    PeerError: a rank died, stopped, left or failed. Every rank raises it, and the group cannot be used afterwards. An
    error inside the with statement is told to all ranks, which then raise PeerError instead of waiting in vain.
    MismatchError: the ranks disagree, nothing has been sent, and the group stays usable.

    On gloo, waits block the host until the data is there. On NCCL, they order the device's current stream, and the host
    goes on: a death aborts the communicator, and the next verb raises. What differs for NCCL was written by its
    documentation and not run.
    """

    _agreed: Exception | None = None  # an error that no rank need be told of: all have learned about it in agree()

    def __init__(self, group: Any, method: str) -> None:
        self.group = process_group(group)
        self.method = method
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.bytes_sent = 0
        self._watch = watch_of(self.group) if self.size > 1 else None
        self._buffers: dict[str, list[list[torch.Tensor]]] = {}

    # ---- what methods call ----

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and error is not self._agreed:
            self._give_up(error)
        self._buffers.clear()
        self._state(NOT_IN_A_CALL)

    def agree(self, step: str, *, refused: Exception | None = None, **facts: object) -> None:
        """Compare facts, by their repr, with those of all ranks; the method and the step are among them.

        A rank whose own checks failed passes its error as `refused`: it raises it, and the others raise MismatchError.
        """
        facts = {"method": self.method, "step": step, **facts}
        text = {name: repr(value) for name, value in facts.items()}
        if refused is not None:
            text["refused"] = f"{type(refused).__name__}: {refused}"
        content = json.dumps(text, sort_keys=True).encode()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
        with self._in(step):
            texts = [] if self._same(digest) else self._gather_texts({n: shortened(t) for n, t in text.items()})
        self._agreed = refused
        if refused is None and texts:
            self._agreed = MismatchError(f"{self.method}, {step}, on rank {self.rank}: {difference(texts)}")
        if self._agreed is not None:
            raise self._agreed

    def rotate(self, tensors: Sequence[torch.Tensor], shapes: Sequence[Shape], step: str, lane: str = "") -> Pending:
        """Send tensors to the next rank, and receive from the previous one tensors of these shapes and the same dtypes.

        What is received lies in one of two buffers of the lane, used in turn, so it is valid until the end of the
        rotation after the next one. It may be sent on by the next rotation.
        """
        if len(tensors) != len(shapes):
            raise ShapeError(
                f"{self.method}, {step}: {len(tensors)} tensors are sent, but {len(shapes)} shapes received"
            )
        if self.size == 1:
            return Pending(lambda: None, list(tensors))
        received = self._receive_buffers(lane, tensors, shapes)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self.transfer([(after, x) for x in tensors], [(before, x) for x in received], step)

    def exchange(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], step: str) -> Pending:
        """All-to-all: part r goes to rank r, and a tensor of shape r comes from it. A rank's own part is not copied."""
        self._one_for_each_rank(parts, "parts", step)
        self._one_for_each_rank(shapes, "shapes", step)
        received = [
            parts[r] if r == self.rank else parts[self.rank].new_empty(tuple(shapes[r])) for r in range(self.size)
        ]
        return self.transfer(list(enumerate(parts)), list(enumerate(received)), step)

    def gather(self, x: torch.Tensor, shapes: Sequence[Shape], step: str) -> Pending:
        """All-gather: the shards of all ranks, of these shapes. A rank's own shard is not copied."""
        return self.exchange([x] * self.size, shapes, step)

    def reduce(self, x: torch.Tensor, op: str, step: str) -> torch.Tensor:
        """All-reduce x in place, by "sum" or "max"."""
        if op not in ("sum", "max"):
            raise ShapeError(f'{self.method}, {step}: op must be "sum" or "max", got {op!r}')
        if self.size > 1 and x.numel():
            self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
            with self._in(step):
                self._all_reduce(x, op)
        return x

    # ---- how it is done: by torch.distributed here, by threads in LocalChannel ----

    def _post(self, sends: list[Transfer], receives: list[Transfer]) -> Any:
        """Start transfers."""
        ops = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
        ops += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        works = self._start(lambda: dist.batch_isend_irecv(ops))
        peers = [peer for peer, _ in (*receives, *sends)]
        on_host = ops[0].tensor.device.type == "cpu"
        return [(peer, work, on_host) for peer, work in zip_longest(peers if on_host else (), works)]

    def _finish(self, posted: Any) -> None:
        """Wait for transfers."""
        for peer, work, on_host in posted:
            self._wait(work, peer, on_host)

    def _all_reduce(self, x: torch.Tensor, op: str) -> None:
        kind: Any = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        y = x.contiguous()
        work = self._start(lambda: dist.all_reduce(y, kind, self.group, async_op=True))
        self._wait(work, None, x.device.type == "cpu")
        if y is not x:
            x.copy_(y)

    def _same(self, digest: int) -> bool:
        """Whether all ranks have the same digest."""
        if self._watch is None:
            return True
        both = torch.tensor([digest, -digest], device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        connections = self._watch.connections
        self._wait(self._start(lambda: connections.allreduce([both], options)))
        return bool(both[0] == -both[1])

    def _gather_texts(self, text: dict[str, str]) -> list[dict[str, str]]:
        """The texts of all ranks."""
        assert self._watch is not None
        mine, all_texts = packed(text), torch.empty(self.size, TEXT_BYTES, dtype=torch.uint8, device="cpu")
        connections = self._watch.connections
        self._wait(self._start(lambda: connections.allgather([list(all_texts)], [mine])))
        return [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in all_texts]

    def _give_up(self, error: BaseException) -> None:
        """Tell all ranks that this one failed, unless they know of a failure."""
        if self._watch is not None:
            self._watch.fail((self.rank,), f"failed: {type(error).__name__}: {error}")

    # ---- what the verbs share ----

    def transfer(self, sends: list[Transfer], receives: list[Transfer], step: str) -> Pending:
        """Send tensors to any peers, and receive tensors of any peers into those given; what they hold is in order."""
        sends = [(r, x.detach().contiguous()) for r, x in sends if r != self.rank and x.numel()]
        received = [x for _, x in receives]
        receives = [(r, x) for r, x in receives if r != self.rank and x.numel()]
        if not sends and not receives:
            return Pending(lambda: None, received)
        self.bytes_sent += sum(x.nbytes for _, x in sends)
        with self._in(step):
            posted = self._post([(r, as_bytes(x)) for r, x in sends], [(r, as_bytes(x)) for r, x in receives])

        def finish() -> None:
            with self._in(step):
                self._finish(posted)

        return Pending(finish, received, keep=sends)

    def _receive_buffers(
        self, lane: str, tensors: Sequence[torch.Tensor], shapes: Sequence[Shape]
    ) -> list[torch.Tensor]:
        """Tensors of these shapes in the lane's buffer whose turn it is."""
        turns = self._buffers.setdefault(lane, [[], []])
        turns.reverse()
        flat = turns[0]
        for i, (x, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if i == len(flat):
                flat.append(x.new_empty(0))
            if flat[i].numel() < math.prod(shape) or flat[i].dtype != x.dtype or flat[i].device != x.device:
                flat[i] = x.new_empty(math.prod(shape))
        return [b[: math.prod(shape)].view(tuple(shape)) for b, shape in zip(flat, shapes, strict=False)]

    def _one_for_each_rank(self, items: Sequence[Any], name: str, step: str) -> None:
        if len(items) != self.size:
            raise ShapeError(
                f"{self.method}, {step}: {name} must have one item for each rank, {self.size}: got {len(items)}"
            )

    @contextmanager
    def _in(self, step: str) -> Iterator[None]:
        self._state(f"{self.method}, {step}")
        if self._watch is not None and self._watch.failure is not None:
            raise self._error(self._watch.failure)
        yield
        self._state(f"{self.method}, after {step}")

    def _state(self, state: str) -> None:
        if self._watch is not None:
            self._watch.state = state

    def _start(self, start: Callable[[], Any]) -> Any:
        """Works that start() gives; an error of this rank alone stays as it is."""
        try:
            return start()
        except RuntimeError as error:
            failure = self._watch.noticed() if self._watch is not None else None
            if failure is None:
                raise
            raise self._error(failure) from error

    def _wait(self, work: Any, peer: int | None = None, on_host: bool = True) -> None:
        """Wait for a Work: on the host with a time limit, on a device by the order of its stream."""
        if not on_host:
            self._start(work.wait)
            return
        watch = self._watch
        assert watch is not None
        begin = time.monotonic()
        limit = watch.timeout - 2 * watch.patience  # leaves time to ask and to tell
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            late = time.monotonic() - begin >= limit
            raise self._error(watch.overdue(peer) if late else watch.cause(error)) from error

    def _error(self, failure: Failure) -> PeerError:
        here = self._watch.state if self._watch is not None else self.method
        return PeerError(f"{here}, on rank {self.rank}: {failure}", failure.peers)


def process_group(group: Any) -> dist.ProcessGroup:
    """The process group of `group`, which may be a 1-D DeviceMesh."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ShapeError(f"group: a DeviceMesh must have one dimension, as mesh['cp'] has; got {group.ndim}")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise DTypeError(f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    return group


def watch_of(group: dist.ProcessGroup) -> Watch:
    """The group's Watch, made by its first Channel; or the error of making it, for there is no second attempt."""
    if group not in _watches:
        try:
            _watches[group] = Watch(group)
        except PeerError as error:
            _watches[group] = error
        device = device_of(group)
        if isinstance(_watches[group], Watch) and device.type != "cpu":
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes NCCL's communicator, with all ranks
    watch = _watches[group]
    if isinstance(watch, PeerError):
        raise PeerError(str(watch), watch.peers)
    return watch


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes, so that every dtype can be sent."""
    return x.reshape(-1).view(torch.uint8)


def shortened(text: str) -> str:
    """A text, or its beginning and a digest."""
    if len(text) <= 200:
        return text
    return f"{text[:150]}... ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


def packed(text: dict[str, str]) -> torch.Tensor:
    """A dictionary as bytes of fixed length; values are shortened until it fits."""
    length = TEXT_BYTES
    while len(data := json.dumps({k: v[:length] for k, v in text.items()}).encode()) > TEXT_BYTES:
        length //= 2
    return torch.frombuffer(bytearray(data.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def difference(texts: list[dict[str, str]]) -> str:
    """Which facts differ between the ranks, and on which ranks."""
    refusals = [f"rank {r} refused the call: {t['refused']}" for r, t in enumerate(texts) if "refused" in t]
    if refusals:
        return "; ".join(refusals)
    differing = []
    for name in dict.fromkeys(n for t in texts for n in t):
        values: dict[str, list[int]] = {}
        for rank, t in enumerate(texts):
            values.setdefault(t.get(name, "missing"), []).append(rank)
        if len(values) > 1:
            differing.append(f"{name} is " + ", ".join(f"{v} on {ranks(r)}" for v, r in values.items()))
    return "the ranks disagree: " + ("; ".join(differing) or "long values differ beyond what is shown")
