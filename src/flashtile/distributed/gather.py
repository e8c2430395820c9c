"""Gather: the keys that a rank's queries see come at once, from all ranks; their gradients go back at once."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from flashtile.distributed import arithmetic, messages, segments
from flashtile.distributed.arithmetic import Call, Keys, Saved, Sums
from flashtile.distributed.messages import Transport
from flashtile.distributed.plan import Plan


def forward(channel: Transport, plan: Plan, call: Call, q: Tensor, keys: Keys, out: Tensor, lse: Tensor) -> None:
    """Merge attention to the keys of all places into out and lse."""
    arithmetic.forward(call, plan.gathered_pieces, q, _gather(channel, plan, keys, "forward, keys"), out, lse)


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
    """Add gradients to dq, to the sums of this rank's own keys, and to those of a bias of all pairs."""
    gathered = _gather(channel, plan, keys, "backward, keys")
    for call in calls:
        own = sums.of_lane(call)
        held = own.zeros(segments.rows(plan.gathered))
        arithmetic.backward(call, plan.gathered_pieces, saved, gathered, dq, held, dbias)
        _return(channel, plan, held, own, "backward, gradients")


def _peers(plan: Plan) -> Iterable[tuple[int, int]]:
    """The other places, and the ranks there with the same heads."""
    return [(place, rank) for place, rank in enumerate(plan.ring) if place != plan.place]


def _gather(channel: Transport, plan: Plan, keys: Keys, step: str) -> Keys:
    """All keys that this rank's queries see, in the order of tokens."""
    parts, shapes, sources = {}, {}, {}
    for place, rank in _peers(plan):
        _, some = segments.within(plan.layout, plan.needs(place))
        parts[rank] = [messages.rows(x, axis, some) for x, axis in keys]
        sources[rank], _ = segments.within(plan.layout_at(place), plan.needs(plan.place))
        shapes[rank] = [messages.with_rows(x, axis, segments.rows(sources[rank])) for x, axis in keys]
    pending = messages.post(channel, keys.k, parts, shapes, step)
    n = segments.rows(plan.gathered)
    found = [x.new_empty(messages.with_rows(x, axis, n)[0]) for x, axis in keys]
    moves = segments.moves(plan.layout, plan.gathered)
    for target, (x, axis) in zip(found, keys, strict=True):
        messages.place(target, axis, x, moves)
    arrived = pending()
    for rank, source in sources.items():
        moves = segments.moves(source, plan.gathered)
        for target, x, (_, axis) in zip(found, arrived[rank], keys, strict=True):
            messages.place(target, axis, x, moves)
    return keys.like(found)


def _return(channel: Transport, plan: Plan, held: Sums, own: Sums, step: str) -> None:
    """Send the sums of gathered keys home, and add what other ranks send, in the order of ranks."""
    parts, shapes, targets = {}, {}, {}
    for place, rank in _peers(plan):
        source, _ = segments.within(plan.layout_at(place), plan.needs(plan.place))
        some = [rows for _, rows in messages.in_order(segments.moves(source, plan.gathered))]
        parts[rank] = [messages.rows(x, axis, some) for x, axis in held]
        _, targets[rank] = segments.within(plan.layout, plan.needs(place))
        n = sum(s.stop - s.start for s in targets[rank])
        shapes[rank] = [messages.with_rows(x, axis, n) for x, axis in held]
    pending = messages.post(channel, held.dk, parts, shapes, step)
    back = [(b, a) for a, b in segments.moves(plan.layout, plan.gathered)]
    for (target, axis), (x, _) in zip(own, held, strict=True):
        messages.place(target, axis, x, back, add=True)
    arrived = pending()
    for rank in sorted(targets):
        moves, at = [], 0
        for s in targets[rank]:
            moves.append((slice(at, at + s.stop - s.start), s))
            at += s.stop - s.start
        for (target, axis), x in zip(own, arrived[rank], strict=True):
            messages.place(target, axis, x, moves, add=True)
