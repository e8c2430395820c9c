"""Pieces: together they see each visible pair once, and no other, for any shards, masks and lengths."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flashtile.band import FAR, Band
from flashtile.distributed import Shards
from flashtile.distributed.pieces import Uses, pieces
from flashtile.distributed.plan import KEPT_PLANS, Method, plan_of
from flashtile.distributed.segments import Segment, joined, moves, of_rank, rows, tokens, within
from flashtile.distributed.visible import Visible, union
from flashtile.spans import Spans
from flashtile.spans import within as in_spans


@st.composite
def sharded(draw: Any) -> Shards:
    documents = draw(st.lists(st.integers(0, 24), min_size=1, max_size=4))
    ranks = draw(st.integers(1, 5))
    make = draw(st.sampled_from(["contiguous", "zigzag", "striped", "balanced"]))
    return getattr(Shards, make)(documents=documents, ranks=ranks)


@st.composite
def visibles(draw: Any, shards: Shards) -> Visible:
    n = shards.tokens
    limit = st.one_of(st.just(FAR), st.integers(0, 12))
    band, align_end = draw(
        st.one_of(
            st.just((Band(FAR, 0), True)),
            st.builds(lambda x, y: (Band(x, y), True), limit, limit),
            st.builds(lambda x, y, z: (Band(x, y, z), False), limit, limit, st.integers(-9, 9)),
        )
    )
    limits = None
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        shape = (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), max(n, 1), 3)
        ends = np.sort(rng.integers(0, n + 2, (*shape[:-1], 6)), -1)
        limits = Spans(ends[..., ::2], ends[..., 1::2]).limits[:, :, :n]
    lengths = np.array([draw(st.integers(0, n)), draw(st.integers(0, n))]) if draw(st.booleans()) else None
    return Visible(n, shards.starts, band, align_end, limits, lengths)


def mask_of(visible: Visible) -> Any:
    """(2, 2, n, n), by the definitions."""
    n = visible.tokens
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    document = np.searchsorted(visible.starts, np.arange(n), "right")
    mask = np.broadcast_to(document[:, None] == document[None], (2, 2, n, n)).copy()
    for b in range(2):
        length = n if visible.kv_lengths is None else int(visible.kv_lengths[b])
        offset = length - n if visible.align_end else visible.band.offset
        distance = j - (i + offset)
        mask[b] &= (-visible.band.left <= distance) & (distance <= visible.band.right) & (j < length)
    if visible.limits is not None:
        mask &= in_spans(visible.limits[..., None, :, :], np.arange(n)[:, None])
    return mask


@given(st.data())
def test_every_visible_pair_once(data: Any) -> None:
    shards = data.draw(sharded())
    visible = data.draw(visibles(shards))
    uses = Uses(data.draw(st.booleans()), data.draw(st.booleans()))
    wanted = mask_of(visible)
    for rank in range(shards.ranks):
        queries = of_rank(shards, rank)
        needed = union(*(x.reshape(-1) for x in visible.ends(tokens(queries))))
        for peer in range(shards.ranks):
            keys, _ = within(of_rank(shards, peer), needed)
            found = np.zeros((2, 2, rows(queries), rows(keys)), int)
            for x in pieces(visible, queries, keys, uses):
                q, k = np.arange(rows(queries))[x.queries], np.arange(rows(keys))[x.keys]
                i, j = np.arange(len(q))[:, None], np.arange(len(k))[None]
                seen = np.ones((1, 1, 1, 1), bool) if x.band is None else x.band.keep(i, j)[None, None]
                if x.limits is not None:
                    assert x.limits.shape[3] <= 8
                    seen = seen & in_spans(x.limits[..., None, :, :], np.arange(len(k))[:, None])
                if uses.tokens or uses.distance:
                    assert (tokens((x.query,)) == tokens(queries)[q]).all()
                    assert (tokens((x.key,)) == tokens(keys)[k]).all()
                at = np.ix_(np.arange(2)[x.batch], [0, 1], q, k)
                found[at] += seen
                if uses.distance:
                    check_distances(visible, x, seen)
            all_keys = tokens(of_rank(shards, peer))
            whole = wanted[:, :, tokens(queries)]
            assert (found == whole[..., tokens(keys)]).all()
            dropped = np.setdiff1d(all_keys, tokens(keys))
            assert not whole[..., dropped].any()


def check_distances(visible: Visible, x: Any, seen: Any) -> None:
    """Distances of tokens, as ALiBi needs them, from those of rows."""
    q, k = tokens((x.query,))[:, None], tokens((x.key,))[None]
    offset = x.key.n - x.query.n if x.band is None else x.band.offset
    by_rows = x.slope * np.abs(np.arange(x.query.n)[:, None] + offset - np.arange(x.key.n)[None]) + x.far
    shift = np.broadcast_to(np.asarray(visible.offset), (2, 1, 1, 1))[x.batch]
    by_tokens = np.abs(q + shift - k)
    assert (~seen | (by_rows == by_tokens)).all()


@given(sharded(), st.data())
def test_rows_move_to_where_their_tokens_are(shards: Shards, data: Any) -> None:
    some = data.draw(st.integers(1, shards.ranks))
    parts = [of_rank(shards, rank) for rank in range(some)]
    target = joined(parts)
    assert sorted(tokens(target).tolist()) == sorted(x for part in parts for x in tokens(part).tolist())
    found = np.full(rows(target), -1)
    for part in parts:
        for source_rows, target_rows in moves(part, target):
            assert (found[target_rows] == -1).all()
            found[target_rows] = tokens(part)[source_rows]
    assert (found == tokens(target)).all()


def test_common_shards_need_few_calls() -> None:
    causal = Band(FAR, 0)
    for make, most in (("contiguous", 1), ("zigzag", 1), ("striped", 1)):
        shards = getattr(Shards, make)(64, ranks=4)
        visible = Visible(64, shards.starts, causal, True)
        for rank in range(4):
            for peer in range(4):
                found = pieces(visible, of_rank(shards, rank), of_rank(shards, peer), Uses(False, False))
                assert len(found) <= most and all(x.limits is None for x in found), (make, rank, peer, found)


def test_many_segments_are_split() -> None:
    keys = tuple(Segment(10 * n, 1, 5) for n in range(20))
    visible = Visible(200, np.array([0, 200]), Band(FAR, 0), True, np.array([[[[[3, 198]]]]]))
    found = pieces(visible, (Segment(190, 1, 5),), keys, Uses(False, False))
    assert sum((x.limits[..., 1] - x.limits[..., 0]).sum() for x in found if x.limits is not None) + sum(
        (x.keys.stop - x.keys.start) * 5 for x in found if x.limits is None
    ) == 5 * (2 + 19 * 5)


def test_plans_are_not_kept_for_ever() -> None:
    """Batches have other documents each; a plan holds limits, also on the device."""
    plans = []
    for n in range(KEPT_PLANS + 9):
        shards = Shards.zigzag(documents=[5 + n, 30], ranks=4)
        plan = plan_of(shards, Visible(shards.tokens, shards.starts), Method(2, 2), 1, Uses(False, False))
        assert plan.hops and plan.gathered is not None
        plans.append(weakref.ref(plan))
    del plan
    gc.collect()
    assert sum(plan() is not None for plan in plans) <= KEPT_PLANS
