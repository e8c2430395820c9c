"""By heads: within a group of ranks, rows of all heads become all rows of some heads, and back (Ulysses)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtile.distributed import messages, segments
from flashtile.distributed.arithmetic import Keys
from flashtile.distributed.messages import Transport
from flashtile.distributed.plan import Heads, Plan

HeadsOf = Callable[[Heads], slice]  # which heads of a tensor belong to a rank's query heads


def queries(heads: Heads) -> slice:
    return slice(heads.first, heads.stop)


def keys(heads: Heads) -> slice:
    return heads.keys


def every(heads: Heads) -> slice:
    return slice(0, 1)


def to_heads(
    channel: Transport,
    plan: Plan,
    all_heads: tuple[int, int],
    tensors: Sequence[tuple[Tensor, int, HeadsOf]],
    step: str,
) -> list[Tensor]:
    """Of tensors of this rank's rows and all heads, those of the group's rows and this rank's heads.

    Each comes with its axis of rows and with the heads that a rank gets.
    """
    mine = plan.heads(plan.rank, *all_heads)
    parts = {
        rank: [x[:, which(plan.heads(rank, *all_heads))].contiguous() for x, _, which in tensors] for rank in plan.group
    }
    shapes = {
        rank: [
            messages.with_rows(x, axis, segments.rows(home), len(range(x.shape[1])[which(mine)]))
            for x, axis, which in tensors
        ]
        for rank, home in zip(plan.group, plan.homes, strict=True)
    }
    own = parts.pop(plan.rank)
    pending = messages.post(channel, tensors[0][0], parts, {r: s for r, s in shapes.items() if r != plan.rank}, step)
    n = segments.rows(plan.layout)
    found = [
        x.new_empty(messages.with_rows(x, axis, n, shape[0][1])[0])
        for (x, axis, _), shape in zip(tensors, shapes[plan.rank], strict=True)
    ]
    arrived = pending()
    for rank, home in zip(plan.group, plan.homes, strict=True):
        sent = own if rank == plan.rank else arrived[rank]
        moves = segments.moves(home, plan.layout)
        for target, x, (_, axis, _) in zip(found, sent, tensors, strict=True):
            messages.place(target, axis, x, moves)
    return found


def to_rows(
    channel: Transport,
    plan: Plan,
    all_heads: tuple[int, int],
    tensors: Sequence[tuple[Tensor, int, HeadsOf, int]],
    step: str,
) -> list[Tensor]:
    """Of tensors of the group's rows and this rank's heads, those of this rank's rows and all heads.

    Each comes with its axis of rows, the heads that a rank has, and the number of all heads. What several ranks have of
    one head is added, in the order of ranks.
    """
    parts = {}
    for rank, home in zip(plan.group, plan.homes, strict=True):
        some = [rows for _, rows in messages.in_order(segments.moves(home, plan.layout))]
        parts[rank] = [messages.rows(x, axis, some) for x, axis, _, _ in tensors]
    n = segments.rows(plan.homes[plan.group.index(plan.rank)])
    which = {
        rank: [range(total)[of(plan.heads(rank, *all_heads))] for _, _, of, total in tensors] for rank in plan.group
    }
    shapes = {
        rank: [
            messages.with_rows(x, axis, n, len(some))
            for (x, axis, _, _), some in zip(tensors, which[rank], strict=True)
        ]
        for rank in plan.group
    }
    own = parts.pop(plan.rank)
    pending = messages.post(channel, tensors[0][0], parts, {r: s for r, s in shapes.items() if r != plan.rank}, step)
    found = [
        torch.zeros(messages.with_rows(x, axis, n, total)[0], dtype=x.dtype, device=x.device)
        for x, axis, _, total in tensors
    ]
    arrived = pending()
    for rank in plan.group:
        sent = own if rank == plan.rank else arrived[rank]
        for target, x, held in zip(found, sent, which[rank], strict=True):
            target[:, held.start : held.stop] += x
    return found


def of_keys(held: Keys) -> list[tuple[Tensor, int, HeadsOf]]:
    """Keys, with the heads that a rank gets of each."""
    found: list[tuple[Tensor, int, HeadsOf]] = [(held.k, 2, keys), (held.v, 2, keys)]
    for x in (held.bias, held.mask):
        if x is not None:
            found.append((x, 3, every if x.shape[1] == 1 else queries))
    return found
