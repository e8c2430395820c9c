"""A fake device whose clock moves only when a contender advances it, and libraries with a given cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashtile.lab.bench.gpu import ceilings, rows
from flashtile.lab.bench.gpu.peers import HEADS_FIRST, Peer
from flashtile.lab.bench.gpu.rows import Row
from flashtile.lab.bench.timing import Call


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: on a busy machine, two wait for each other longer than tiny work takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class FakeDevice:
    """A fake device. Graphs cost as much as their calls; `grown` is the memory of a call beyond its result."""

    name: str = "cpu"
    cache: int = 1 << 14
    now: float = 0.0
    grown: int = 0
    log: list[str] = field(default_factory=list)  # who was called
    samples: list[tuple[str, ...]] = field(default_factory=list)  # who was called in each sample of the clock

    def describe(self) -> dict[str, Any]:
        return {"name": "fake", "capability": [9, 0], "cuda": "0", "cudnn": 0, "cache": self.cache}

    def seconds(self, call: Call) -> float:
        start, first = self.now, len(self.log)
        call()
        self.samples.append(tuple(self.log[first:]))
        return self.now - start

    def synchronize(self) -> None:
        pass

    def captured(self, call: Call) -> Call:
        call()
        return call

    def growth(self, call: Call) -> int:
        call()
        return self.grown

    def peer(self, name: str, cost: float, *, off: float = 0.0, fails: str = "") -> Peer:
        """Attention that takes `cost` device seconds per pass, is wrong by a factor 1 + off, or fails."""

        def build(row: Row, given: Any) -> Any:
            def forward(q: Any, k: Any, v: Any) -> Any:
                if fails:
                    raise RuntimeError(f"{fails}\nand more")
                self.log.append(name)
                self.now += cost
                group = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                S = q.float() @ k.float().mT * q.shape[-1] ** -0.5
                kind = torch.bfloat16 if row.eight_bits else q.dtype
                return Slow.apply((S.softmax(-1) @ v.float() * (1 + off)).to(kind), self, cost)

            return HEADS_FIRST, forward

        return Peer(name, build)


class Slow(torch.autograd.Function):
    """The identity; its backward pass takes device time."""

    @staticmethod
    def forward(ctx: Any, x: Any, device: FakeDevice, cost: float) -> Any:
        ctx.pay = (device, cost)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        device, cost = ctx.pay
        device.now += cost
        return grad, None, None


def tiny(row: Row) -> Row:
    """The same row with almost no work."""
    n_q = min(row.case.n_q, 8)
    return replace(row, case=replace(row.case, n_q=n_q, n_k=max(n_q, 16), dim=8, heads=4, kv_heads=2, batch=2))


def row_of(words: str, shrink: Callable[[Row], Row] = tiny) -> Row:
    """The first row with these words in its name, shrunk."""
    return shrink(rows.select(only=[words])[0])


def small_ceilings(device: FakeDevice) -> dict[str, ceilings.Ceiling]:
    """A product of a million FLOPs and a copy of a million bytes, one millisecond each."""

    def call() -> None:
        device.log.append("ceiling")
        device.now += 1e-3

    return {"product": ceilings.Ceiling(call, 1e6), "copy": ceilings.Ceiling(call, 1e6)}
