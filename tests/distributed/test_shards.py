"""Shards: every token once, the whole restored, positions within documents, and visible pairs balanced."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashtile as ft
from flashtile.band import FAR, Band
from flashtile.distributed import Run, Shards
from flashtile.distributed.visible import Visible, union
from flashtile.errors import DTypeError, ShapeError

MAKERS = ("contiguous", "zigzag", "striped", "balanced")
DOCUMENTS = st.lists(st.integers(0, 30), min_size=0, max_size=6)


@given(maker=st.sampled_from(MAKERS), ranks=st.integers(1, 9), documents=DOCUMENTS)
def test_every_token_has_one_rank(maker: str, ranks: int, documents: list[int]) -> None:
    more = {"causal": True} if maker == "balanced" else {}
    shards = getattr(Shards, maker)(documents=documents, ranks=ranks, **more)
    total = sum(documents)
    held = [shards.indices(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(held).tolist()) == list(range(total))
    assert max(shards.counts) - min(shards.counts) <= {"zigzag": 2}.get(maker, 64)
    within = np.concatenate([np.arange(n) for n in (0, *documents)])
    x = np.random.default_rng(0).standard_normal((2, total, 3))
    parts = [shards.shard(x, rank) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        assert (part == x[:, held[rank]]).all()
        assert (shards.positions(rank) == within[held[rank]]).all()
    assert (shards.restore(parts) == x).all()
    starts = np.concatenate([[0], np.cumsum(documents)]).astype(np.int64)
    assert getattr(Shards, maker)(cu_seqlens=starts, ranks=ranks, **more) == shards


def test_tensors_keep_their_gradients() -> None:
    torch = pytest.importorskip("torch")
    shards = Shards.zigzag(11, ranks=3)
    x = torch.randn(11, 4, requires_grad=True)
    parts = [shards.shard(x, rank) for rank in range(3)]
    whole = shards.restore(parts)
    assert (whole == x).all()
    (whole * torch.arange(11)[:, None]).sum().backward()
    assert (x.grad == torch.arange(11)[:, None]).all()


def pairs_of_ranks(shards: Shards, visible: Visible) -> list[float]:
    counts = visible.counts()
    return [float(counts[shards.indices(rank)].sum()) for rank in range(shards.ranks)]


def busiest_over_mean(shards: Shards, **visible: object) -> float:
    pairs = pairs_of_ranks(shards, Visible(shards.tokens, shards.starts, **visible))
    return max(pairs) * len(pairs) / sum(pairs)


@pytest.mark.parametrize("tokens", [8192, 50003])
def test_pairs_are_balanced(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    documents = rng.lognormal(6, 1.5, 1000).astype(int) + 1
    documents = documents[: np.searchsorted(np.cumsum(documents), tokens)]
    prefix = ft.masks.prefix_lm(tokens // 5, tokens)
    causal, window = Band(FAR, 0), Band(tokens // 8, 0)
    found = {
        "causal": busiest_over_mean(Shards.balanced(tokens, ranks=8, causal=True), band=causal),
        "window": busiest_over_mean(Shards.balanced(tokens, ranks=8, window=(tokens // 8, 0)), band=window),
        "documents": busiest_over_mean(Shards.balanced(documents=documents, ranks=8, causal=True), band=causal),
        "prefix": busiest_over_mean(Shards.balanced(tokens, ranks=8, spans=prefix), limits=prefix.limits),
    }
    assert max(found.values()) <= 1.01, found
    assert busiest_over_mean(Shards.contiguous(tokens, ranks=8), band=causal) > 1.8  # the measure can fail


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-3, 9)), max_size=12), st.integers(1, 5))
def test_union_covers_all_and_little_more(intervals: list[tuple[int, int]], most: int) -> None:
    begin, end = (np.array([x[0] for x in intervals], int), np.array([x[0] + x[1] for x in intervals], int))
    wanted = {j for b, e in zip(begin, end, strict=True) for j in range(b, e)}
    found = union(begin, end, most)
    held = {j for b, e in found for j in range(b, e)}
    assert held >= wanted and len(found) <= most
    assert all(b < e for b, e in found) and all(x[1] < y[0] for x, y in itertools.pairwise(found))
    assert {j for b, e in union(begin, end, 99) for j in range(b, e)} == wanted


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Shards(((Run(0, 0, 1, 4),), (Run(0, 3, 1, 2),)), (5,)), ShapeError, "token 3 2 times"),
        (lambda: Shards(((Run(0, 0, 1, 4),), ()), (5,)), ShapeError, "token 4 0 times"),
        (lambda: Shards(((Run(0, 0, 2, 4),),), (5,)), ShapeError, "within documents"),
        (lambda: Shards((), (5,)), ShapeError, "at least one rank"),
        (lambda: Shards.zigzag(8, ranks=0), ShapeError, "ranks: expected"),
        (lambda: Shards.zigzag(ranks=2), ShapeError, "one of tokens, documents and cu_seqlens, got none"),
        (lambda: Shards.zigzag(8, documents=[8], ranks=2), ShapeError, "got tokens and documents"),
        (lambda: Shards.zigzag(documents=[3, -1], ranks=2), ShapeError, "documents: expected"),
        (lambda: Shards.zigzag(cu_seqlens=np.array([1, 2]), ranks=2), ShapeError, "rise from 0"),
        (lambda: Shards.zigzag(documents=np.ones((2, 2)), ranks=2), DTypeError, "documents: expected integers"),
        (lambda: Shards.zigzag(8, ranks=2).indices(2), ShapeError, "rank: expected an integer from 0 to 1"),
        (lambda: Shards.zigzag(8, ranks=2).indices("a"), DTypeError, "rank: expected an integer"),
        (lambda: Shards.zigzag(8, ranks=2).shard(np.zeros(8), 0), ShapeError, "dim: expected an axis of x"),
        (lambda: Shards.zigzag(8, ranks=2).shard([0] * 8, 0), DTypeError, "x: expected an array or a tensor"),
        (lambda: Shards.zigzag(8, ranks=2).restore([[0]]), DTypeError, r"parts\[0\]: expected an array or a tensor"),
        (lambda: Shards.balanced(8, ranks=2, causal="no"), DTypeError, "causal: expected True or False"),
        (lambda: Shards(((0, 0, 1, 5),), (5,)), DTypeError, "runs: expected a sequence of Run for each rank"),
        (lambda: Shards.zigzag(8, ranks=2).shard(np.zeros((7, 2)), 0), ShapeError, "x: expected 8 tokens"),
        (lambda: Shards.zigzag(8, ranks=2).restore([np.zeros((4, 2))]), ShapeError, "parts: expected"),
    ],
)
def test_bad_input_is_named(make: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]
