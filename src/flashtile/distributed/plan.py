"""Plan: which heads, rows and blocks of keys a rank handles in a call, and what it sends to whom."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np

from flashtile.distributed import segments as seg
from flashtile.distributed.pieces import Piece, Uses, pieces
from flashtile.distributed.segments import Interval, Segments
from flashtile.distributed.shards import Shards
from flashtile.distributed.visible import Visible, union

KEPT_PLANS = 32
KEPT_INTERVALS = 64  # of a rank's needs


class Method(NamedTuple):
    """How a call is split: by heads within groups of `ulysses` ranks, by tokens over `ring` such groups.

    gather: keys come at once, not block by block.
    """

    ulysses: int
    ring: int
    gather: bool = False

    def __str__(self) -> str:
        by_tokens = "gather" if self.gather else "ring"
        if self.ulysses == 1:
            return by_tokens
        return "ulysses" if self.ring == 1 else f"ulysses {self.ulysses} x {by_tokens} {self.ring}"


class Heads(NamedTuple):
    """Query heads of a rank, and the key heads that they attend to."""

    first: int
    stop: int
    group: int  # query heads per key head

    @property
    def n(self) -> int:
        return self.stop - self.first

    @property
    def keys(self) -> slice:
        return slice(self.first // self.group, -(-self.stop // self.group) if self.n else self.first // self.group)

    def lanes(self, n: int) -> list[Heads]:
        """The heads in n parts, each with key heads of its own."""
        keys = self.keys
        bounds = [self._bound(keys.start + (keys.stop - keys.start) * lane // n) for lane in range(n + 1)]
        return [Heads(a, b, self.group) for a, b in pairwise(bounds)]

    def calls(self) -> list[tuple[slice, slice]]:
        """Slices of these query heads and of their key heads, in each of which all key heads have as many queries'."""
        keys = self.keys
        found: list[tuple[slice, slice]] = []
        for g in range(keys.stop - keys.start):
            a, b = (self._bound(keys.start + g + n) - self.first for n in (0, 1))
            if found and (b - a) * (g - found[-1][1].start) == a - found[-1][0].start:
                found[-1] = slice(found[-1][0].start, b), slice(found[-1][1].start, g + 1)
            else:
                found.append((slice(a, b), slice(g, g + 1)))
        return found

    def _bound(self, key_head: int) -> int:
        """The first query head of a key head that is among these."""
        return min(max(key_head * self.group, self.first), self.stop)


class Hop(NamedTuple):
    """One step of the ring on one rank: the block of keys that it holds, and what goes on from it."""

    block: Segments
    pieces: list[Piece]
    onward: list[slice]  # rows of the block that later ranks need; they go to the next one
    arriving: Segments  # the next block
    final: list[slice]  # rows that no later rank needs: their gradients go home
    coming_home: list[tuple[slice, slice]]  # where rows that are final elsewhere at this step are here


class Plan:
    """The plan of one rank. What is sent is worked out by every rank from the same shards and options."""

    def __init__(self, shards: Shards, visible: Visible, method: Method, rank: int, uses: Uses) -> None:
        self.shards, self.visible, self.method, self.rank, self.uses = shards, visible, method, rank, uses
        self.place, within = divmod(rank, method.ulysses)
        self.group = list(range(self.place * method.ulysses, (self.place + 1) * method.ulysses))
        self.ring = list(range(within, shards.ranks, method.ulysses))
        self.homes = [seg.of_rank(shards, peer) for peer in self.group]
        self._layouts: dict[int, Segments] = {}
        self._needs: dict[int, tuple[Interval, ...]] = {}
        self.layout = self.layout_at(self.place)

    def layout_at(self, place: int) -> Segments:
        """The rows that the ranks of a place have together."""
        if place not in self._layouts:
            u = self.method.ulysses
            parts = [seg.of_rank(self.shards, peer) for peer in range(place * u, (place + 1) * u)]
            self._layouts[place] = parts[0] if u == 1 else seg.joined(parts)
        return self._layouts[place]

    def needs(self, place: int) -> tuple[Interval, ...]:
        """The tokens that the queries of a place see."""
        if place not in self._needs:
            begin, end = self.visible.ends(seg.tokens(self.layout_at(place)))
            self._needs[place] = tuple(union(begin.reshape(-1), end.reshape(-1), KEPT_INTERVALS))
        return self._needs[place]

    def kept(self, source: int, hop: int) -> tuple[Interval, ...]:
        """What the places from this hop on need of a block."""
        n = self.method.ring
        ends = [x for k in range(hop, n) for x in self.needs((source + k) % n)]
        both = np.array(ends, np.int64).reshape(-1, 2)
        return tuple(union(both[:, 0], both[:, 1], KEPT_INTERVALS))

    def block(self, source: int, hop: int) -> Segments:
        """The rows of a block that arrive at a hop."""
        whole = self.layout_at(source)
        return whole if hop == 0 else seg.within(whole, self.kept(source, hop))[0]

    def final(self, source: int, hop: int) -> list[slice]:
        """The rows of a block that no later rank needs."""
        block = self.block(source, hop)
        onward = seg.within(block, self.kept(source, hop + 1))[1] if hop + 1 < self.method.ring else []
        return without(onward, seg.rows(block))

    @cached_property
    def hops(self) -> list[Hop]:
        n, found = self.method.ring, []
        for hop in range(n):
            source = (self.place - hop) % n
            block = self.block(source, hop)
            last = hop + 1 == n
            mine = self.block(self.place, hop)
            final = tuple(s for rows in self.final(self.place, hop) for s in seg.rows_of(mine, rows))
            found.append(
                Hop(
                    block,
                    pieces(self.visible, self.layout, block, self.uses),
                    [] if last else seg.within(block, self.kept(source, hop + 1))[1],
                    () if last else self.block((source - 1) % n, hop + 1),
                    self.final(source, hop) if hop else [],
                    seg.moves(final, self.layout) if hop else [],
                )
            )
        return found

    @cached_property
    def gathered(self) -> Segments:
        """All keys that the queries of this place see, in the order of tokens."""
        return seg.of_intervals(self.needs(self.place))

    @cached_property
    def gathered_pieces(self) -> list[Piece]:
        return pieces(self.visible, self.layout, self.gathered, self.uses)

    def heads(self, rank: int, heads: int, kv_heads: int) -> Heads:
        """The query heads of a rank: the ranks of a group share all of them out."""
        u, within = self.method.ulysses, rank % self.method.ulysses
        return Heads(heads * within // u, heads * (within + 1) // u, heads // max(kv_heads, 1))


def without(some: list[slice], n: int) -> list[slice]:
    """The rows among n that are in none of some rising slices."""
    edges = [0, *(x for s in some for x in (s.start, s.stop)), n]
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def plan_of(shards: Shards, visible: Visible, method: Method, rank: int, uses: Uses) -> Plan:
    """The plan of a call; plans of calls before it are kept, because every layer makes the same."""
    arrays = (visible.limits, visible.kv_lengths)
    contents = tuple(None if x is None else (x.shape, blake2b(x.tobytes()).digest()) for x in arrays)
    key = (shards, visible.band, visible.align_end, contents, method, rank, uses)
    with _LOCK:
        plan = _PLANS.pop(key, None) or Plan(shards, visible, method, rank, uses)
        _PLANS[key] = plan
        while len(_PLANS) > KEPT_PLANS:
            _PLANS.popitem(last=False)
    return plan


_PLANS: OrderedDict[object, Plan] = OrderedDict()
_LOCK = Lock()
