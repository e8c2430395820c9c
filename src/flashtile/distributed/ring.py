"""The ring: blocks of keys go from rank to rank while each computes; sums of gradients follow them, and go home."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flashtile.distributed import arithmetic, messages, segments
from flashtile.distributed.arithmetic import Call, Keys, Saved, Sums
from flashtile.distributed.messages import Shape, Transport
from flashtile.distributed.plan import Hop, Plan


def forward(channel: Transport, plan: Plan, call: Call, q: Tensor, keys: Keys, out: Tensor, lse: Tensor) -> None:
    """Merge attention to the keys of all places into out and lse."""
    for number, hop in enumerate(plan.hops):
        arriving = _pass_on(channel, plan, hop, keys, f"forward, block {number + 1} of {len(plan.hops)}")
        arithmetic.forward(call, hop.pieces, q, keys, out, lse)
        keys = arriving() or keys
        del arriving  # so that no block outlives its step


def backward(
    channel: Transport,
    plan: Plan,
    calls: list[Call],
    saved: Saved,
    keys: Keys,
    dq: Tensor,
    sums: Sums,
    dbias: Tensor | None,
) -> None:
    """Add gradients to dq, to the sums of this rank's own keys, and to those of a bias of all pairs.

    calls: one for each lane of heads. The sums of a lane are on their way while the next lane is computed, so there are
    no more than three lanes of sums at a time: one that is computed, one that leaves, and one that arrives.
    """
    travelling: list[Callable[[], Sums | None]] = [lambda: None for _ in calls]
    for number, hop in enumerate(plan.hops):
        step = f"backward, block {number + 1} of {len(plan.hops)}"
        arriving = _pass_on(channel, plan, hop, keys, step)
        for call in calls:
            own = sums.of_lane(call)
            held = own if number == 0 else travelling.pop(0)() or own.zeros(segments.rows(hop.block))
            arithmetic.backward(call, hop.pieces, saved, keys, dq, held, dbias)
            if number:
                travelling.append(_pass_sums(channel, plan, number, held, own, f"{step}, gradients"))
            del held
        keys = arriving() or keys
        del arriving  # so that no block outlives its step
    for finish in travelling:
        finish()


def _pass_on(channel: Transport, plan: Plan, hop: Hop, keys: Keys, step: str) -> Callable[[], Keys | None]:
    """Begin to send what later ranks need of a block, and to receive the next one."""
    n = segments.rows(hop.arriving)
    following, before = (plan.ring[(plan.place + x) % len(plan.ring)] for x in (1, -1))
    parts = [messages.rows(x, axis, hop.onward) for x, axis in keys] if hop.onward else []
    shapes = [messages.with_rows(x, axis, n) for x, axis in keys] if n else []
    kinds = keys.kinds
    arrived = messages.post(channel, keys.k, {following: parts}, {before: shapes}, step)

    def finish() -> Keys | None:
        found = arrived()[before]
        return Keys.of(found, kinds) if shapes else None

    return finish


def _pass_sums(
    channel: Transport, plan: Plan, number: int, held: Sums, own: Sums, step: str
) -> Callable[[], Sums | None]:
    """Begin to send the sums of a block to the next rank, those that are complete home, and to receive others'."""
    hop, size = plan.hops[number], len(plan.ring)
    following, before, home, away = (plan.ring[(plan.place + x) % size] for x in (1, -1, -number, number))
    n_arriving = segments.rows(hop.arriving)
    n_home = sum(len(range(s.start, s.stop, s.step or 1)) for s, _ in hop.coming_home)
    parts: dict[int, list[Tensor]] = {following: [], home: []}
    shapes: dict[int, list[Shape]] = {before: [], away: []}
    for rank, rows in ((following, hop.onward), (home, hop.final)):
        if rows:
            parts[rank] += [messages.rows(x, axis, rows) for x, axis in held]
    arriving = [messages.with_rows(x, axis, n_arriving) for x, axis in held] if n_arriving else []
    coming = [messages.with_rows(x, axis, n_home) for x, axis in held] if n_home else []
    shapes[before] += arriving
    shapes[away] += coming
    arrived = messages.post(channel, held.dk, parts, shapes, step)

    def finish() -> Sums | None:
        found = arrived()
        # Of one rank come the sums that go on first, then those that are complete.
        complete = found[away][len(arriving) if away == before else 0 :]
        for (target, axis), x in zip(own, complete, strict=False):
            messages.place(target, axis, x, hop.coming_home, add=True)
        return own.like(found[before][: len(arriving)]) if arriving else None

    return finish
