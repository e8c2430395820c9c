"""Parallel: what a call with sharded tokens sends and holds on each rank, by each method, and its least time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flashtile.cost.hardware import Hardware
from flashtile.cost.shard_pairs import pairs_by_band, pairs_by_ends
from flashtile.cost.traffic import backward_flops_per_pair, forward_flops_per_pair
from flashtile.distributed import segments
from flashtile.distributed.pieces import Uses
from flashtile.distributed.plan import Heads, Method, Plan
from flashtile.distributed.shards import Shards
from flashtile.distributed.visible import Visible
from flashtile.errors import DTypeError, ShapeError, UnsupportedError
from flashtile.numerics.dtypes import ITEMSIZE, Array
from flashtile.problem import Problem

PLANNED = 32  # ranks up to which every message is planned; for more ranks, bytes are a bound
TOKENS = 1 << 23  # of all plans together, each of which looks at all tokens; beyond, too, unless there is no bound


@dataclass(frozen=True, slots=True)
class Links:
    """The links between GPUs: how many a node has, and the bytes per second of one GPU in one direction."""

    node: int
    inside: float
    across: float

    def ring_seconds(self, bytes_: float, ranks: int) -> float:
        """To the next rank: the slowest link of a ring decides."""
        return bytes_ / (self.inside if ranks <= self.node else self.across)

    def spread_seconds(self, bytes_: float, group: int) -> float:
        """To all other ranks of a group of neighbours, each the same share; both kinds of links work at once."""
        near = min(group, self.node) - 1
        share = near / max(group - 1, 1)
        return max(bytes_ * share / self.inside, bytes_ * (1 - share) / self.across)


@dataclass(frozen=True, slots=True)
class Parallel:
    """One call by one method. Bytes and pairs are those of the rank that has most; seconds are the least there can be.

    Times count products at the peak rate and messages at the rates of the links, a ring's messages behind its products.
    """

    method: str
    ranks: int
    exact: bool  # every message was planned; otherwise, bytes are a bound
    balance: float  # pairs of the busiest rank / the mean
    pairs: int  # visible, of all heads
    sent: int  # bytes that leave a rank in the forward pass
    sent_backward: int
    held: int  # bytes in the backward pass beyond the rank's own tensors and their gradients
    seconds: float | None
    backward_seconds: float | None
    ideal: float | None  # the share of the time of forward and backward that evenly split products take


class _Row(NamedTuple):
    """Bytes of one token of some heads, over the batch."""

    q: int
    out: int
    lse: int
    kv: int
    dq: int  # as accumulated
    dkv: int


class _Sent(NamedTuple):
    """Bytes that a rank sends: at each step of a ring, or at once; and to exchange heads for tokens. What it holds."""

    forward: list[int]
    backward: list[int]
    heads: int
    heads_backward: int
    held: int

    @property
    def totals(self) -> tuple[int, int]:
        return sum(self.forward) + self.heads, sum(self.backward) + self.heads_backward


def parallel(
    p: Problem, shards: Shards, hardware: Hardware | None = None, links: Links | None = None
) -> tuple[Parallel, ...]:
    """The call of this problem by every method that fits, if its tokens are sharded; with times if rates are given."""
    if not isinstance(shards, Shards):
        raise DTypeError(f"shards: expected a flashtile.distributed.Shards, got {type(shards).__name__}")
    if links is not None and not isinstance(links, Links):
        raise DTypeError(f"links: expected a flashtile.cost.parallel.Links, got {type(links).__name__}")
    if p.packed or p.n_q != p.n_k:
        raise UnsupportedError("shards: expected one row of as many queries as keys; documents belong to the Shards")
    if shards.tokens != p.n_q:
        raise ShapeError(f"shards: expected those of {p.n_q} tokens, got {shards.tokens}")
    visible = Visible(p.n_q, shards.starts, p.band, p.align_end, p.spans, p.kv_lengths)
    one_step = len({run.step for runs in shards.runs for run in runs}) <= 1
    if p.spans is None and p.kv_lengths is None and one_step:
        pairs = pairs_by_band(shards, p.band_for(p.n_q, p.n_k))
    elif shards.ranks <= PLANNED:
        pairs = pairs_by_ends(shards, visible)
    else:
        what = f"at most {PLANNED} ranks with spans, kv_lengths or runs of several steps"
        raise UnsupportedError(f"shards: expected {what}, got {shards.ranks}")
    return tuple(
        _by_method(p, shards, visible, method, pairs, hardware, links)
        for method in _methods(shards.ranks, p.heads, links)
    )


def _methods(ranks: int, heads: int, links: Links | None) -> Iterator[Method]:
    yield Method(1, ranks, True)
    yield Method(1, ranks)
    if 1 < ranks <= heads:
        yield Method(ranks, 1)
    u = min(8 if links is None else links.node, heads)
    if 1 < u < ranks and ranks % u == 0:
        yield Method(u, ranks // u)


def _by_method(
    p: Problem,
    shards: Shards,
    visible: Visible,
    method: Method,
    pairs: Array,
    hardware: Hardware | None,
    links: Links | None,
) -> Parallel:
    u, n = method.ulysses, method.ring
    of_places = pairs.reshape(n, u, n, u).sum((1, 3))  # ranks of a place share its rows, each for its own heads
    heads = -(-p.heads // u)
    has_bound = visible.limits is None and visible.kv_lengths is None
    exact = shards.ranks <= PLANNED and (shards.ranks * shards.tokens <= TOKENS or not has_bound)
    each_rank = _planned(p, shards, visible, method) if exact else [_bounded(p, shards, method)]
    sent = _most(each_rank)
    by_rank = of_places.sum(1)
    found = Parallel(
        method=str(method),
        ranks=shards.ranks,
        exact=exact,
        balance=float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0,
        pairs=int(by_rank.max()) * heads * p.sequences,
        sent=max(x.totals[0] for x in each_rank),
        sent_backward=max(x.totals[1] for x in each_rank),
        held=sent.held,
        seconds=None,
        backward_seconds=None,
        ideal=None,
    )
    if hardware is None or links is None:
        return found
    flops = forward_flops_per_pair(p.dim, p.dim_v), backward_flops_per_pair(p.dim, p.dim_v)
    places = np.arange(n)
    steps = [int(of_places[places, (places - hop) % n].max()) for hop in range(n)]
    times = []
    for each, moved, exchanged in zip(
        flops, (sent.forward, sent.backward), (sent.heads, sent.heads_backward), strict=True
    ):
        scale = heads * p.sequences * each / hardware.rates.flops
        if method.gather:
            seconds = int(by_rank.max()) * scale + links.spread_seconds(sum(moved), shards.ranks)
        else:
            moving = (links.ring_seconds(x, shards.ranks) for x in moved)
            seconds = sum(max(step * scale, x) for step, x in zip(steps, moving, strict=True))
        times.append(seconds + links.spread_seconds(exchanged, u))
    even = int(pairs.sum()) / shards.ranks * p.heads * p.sequences * sum(flops) / hardware.rates.flops
    return replace(found, seconds=times[0], backward_seconds=times[1], ideal=even / sum(times))


def _row(p: Problem, heads: Heads) -> _Row:
    n, size, wide = p.sequences, ITEMSIZE[p.dtype], ITEMSIZE[p.accumulator]
    kv = (heads.keys.stop - heads.keys.start) * (p.dim + p.dim_v)
    return _Row(
        n * heads.n * p.dim * size,
        n * heads.n * p.dim_v * ITEMSIZE[p.out_dtype],
        n * heads.n * wide,
        n * kv * size,
        n * heads.n * p.dim * wide,
        n * kv * wide,
    )


def _planned(p: Problem, shards: Shards, visible: Visible, method: Method) -> list[_Sent]:
    """What each rank sends, by the plans that flashtile.distributed makes."""
    return [_of_plan(p, Plan(shards, visible, method, rank, Uses(False, False))) for rank in range(shards.ranks)]


def _most(found: list[_Sent]) -> _Sent:
    """The most that any rank sends at each step."""
    return _Sent(
        [max(step) for step in zip(*(x.forward for x in found), strict=True)],
        [max(step) for step in zip(*(x.backward for x in found), strict=True)],
        max(x.heads for x in found),
        max(x.heads_backward for x in found),
        max(x.held for x in found),
    )


def _of_plan(p: Problem, plan: Plan) -> _Sent:
    method = plan.method
    row = _row(p, plan.heads(plan.rank, p.heads, p.kv_heads))
    if method.gather:
        places = [place for place in range(method.ring) if place != plan.place]
        given = sum(segments.rows(segments.within(plan.layout, plan.needs(place))[0]) for place in places)
        taken = [segments.within(plan.layout_at(place), plan.needs(plan.place))[0] for place in places]
        back = sum(map(segments.rows, taken))
        held = segments.rows(plan.gathered) * (row.kv + row.dkv)
        return _Sent([given * row.kv], [given * row.kv + back * row.dkv], 0, 0, held)
    forward, backward, block = [], [], 0
    for hop in range(method.ring):
        source = (plan.place - hop) % method.ring
        rows = segments.rows(plan.block(source, hop))
        onward = rows - _n(plan.final(source, hop))
        forward.append(onward * row.kv)
        backward.append(onward * row.kv + (rows * row.dkv if hop else 0))
        block = max(block, rows if hop else 0)
    held = 2 * block * (row.kv + row.dkv)
    exchanged, exchanged_back, more = _exchanged(p, plan, row)
    return _Sent(forward, backward, exchanged, exchanged_back, held + more)


def _exchanged(p: Problem, plan: Plan, mine: _Row) -> tuple[int, int, int]:
    """Bytes that a rank sends to exchange heads for tokens and back, forward and backward; and what it then holds."""
    if plan.method.ulysses == 1:
        return 0, 0, 0
    own = segments.rows(plan.homes[plan.group.index(plan.rank)])
    forward = backward = 0
    alone = p.kv_heads % plan.method.ulysses == 0
    for peer, home in zip(plan.group, plan.homes, strict=True):
        if peer == plan.rank:
            continue
        theirs, n = _row(p, plan.heads(peer, p.heads, p.kv_heads)), segments.rows(home)
        forward += own * (theirs.q + theirs.kv) + n * (mine.out + mine.lse)
        backward += own * theirs.out + n * (mine.q + (mine.kv if alone else mine.dkv))
    held = segments.rows(plan.layout) * (mine.q + 2 * mine.out + mine.lse + mine.dq + mine.kv + mine.dkv)
    return forward, backward, held


def _bounded(p: Problem, shards: Shards, method: Method) -> _Sent:
    """The same for many ranks: at most every token of a block is needed by all; of a window, only what it reaches."""
    u, n = method.ulysses, method.ring
    row = _row(p, Heads(0, -(-p.heads // u), p.group))
    own = max(shards.counts)
    block = own * u
    if method.gather:
        runs = max(len(segments.of_rank(shards, rank)) for rank in range(shards.ranks))
        given = min((n - 1) * block, runs * (p.band.left + p.band.right))
        return _Sent([given * row.kv], [given * (row.kv + row.dkv)], 0, 0, (given + block) * (row.kv + row.dkv))
    forward = [block * row.kv] * (n - 1) + [0]
    backward = [x + (block * row.dkv if hop else 0) for hop, x in enumerate(forward)]
    held = 2 * block * (row.kv + row.dkv) if n > 1 else 0
    if u == 1:
        return _Sent(forward, backward, 0, 0, held)
    exchanged = (u - 1) * own * (row.q + row.kv + row.out + row.lse)
    exchanged_back = (u - 1) * own * (row.out + row.q + row.dkv)
    held += block * (row.q + 2 * row.out + row.lse + row.dq + row.kv + row.dkv)
    return _Sent(forward, backward, exchanged, exchanged_back, held)


def _n(rows: Sequence[slice]) -> int:
    return sum(len(range(s.start, s.stop, s.step or 1)) for s in rows)
