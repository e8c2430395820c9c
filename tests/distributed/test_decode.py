"""decode(): queries on all ranks, keys on some, against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import flashtile as ft  # noqa: E402
from flashtile import distributed  # noqa: E402
from flashtile.distributed import Shards  # noqa: E402
from tests.distributed.test_methods import option  # noqa: E402
from tests.support.simulated_ranks import simulate  # noqa: E402

OPTIONS = ("causal", "window", "band", "alibi", "softcap", "sink", "bias of keys", "mask of keys", "lengths")


def tensors(n_q: int, n_k: int, rng: np.random.Generator) -> list[Any]:
    return [torch.tensor(rng.standard_normal((2, h, n, 8))) for h, n in ((4, n_q), (2, n_k), (2, n_k))]


def part(options: dict[str, Any], shards: Shards, rank: int) -> dict[str, Any]:
    return {name: shards.shard(x, rank, 3) if name in ("mask", "bias") else x for name, x in options.items()}


@given(st.data())
def test_shares_of_a_cache(data: Any) -> None:
    n_k = data.draw(st.integers(1, 40))
    n_q, ranks = data.draw(st.integers(1, min(4, n_k))), data.draw(st.integers(1, 5))
    name = data.draw(st.sampled_from(OPTIONS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q, k, v = tensors(n_q, n_k, rng)
    options = option(name, n_k, 4, rng)
    shards = getattr(Shards, data.draw(st.sampled_from(["contiguous", "zigzag", "striped"])))(n_k, ranks=ranks)

    def job(group: Any) -> Any:
        own = [shards.shard(x, group.rank()) for x in (k, v)]
        return distributed.decode(
            q, *own, group=group, shards=shards, return_lse=True, **part(options, shards, group.rank())
        )

    wanted = ft.attention(q, k, v, return_lse=True, backend="reference", **options)
    for found in simulate(ranks, job):
        for x, y in zip(found, wanted, strict=True):
            assert bool(((x == y) | ((x - y).abs() <= 1e-12)).all())


def test_any_keys_without_shards() -> None:
    """Each rank has as many keys as it has, of which it uses some."""
    rng = np.random.default_rng(0)
    counts, used = [5, 0, 9], [[5, 2], [0, 0], [9, 4]]
    q, k, v = tensors(1, sum(counts), rng)
    sink = torch.tensor(rng.standard_normal(4))
    parts = [x.split(counts, 2) for x in (k, v)]
    mask = torch.zeros(2, 1, 1, sum(counts), dtype=torch.bool)
    for b in range(2):
        for first, lengths in zip((0, 5, 5), used, strict=True):
            mask[b, ..., first : first + lengths[b]] = True

    def job(group: Any) -> Any:
        r = group.rank()
        return distributed.decode(q, parts[0][r], parts[1][r], group=group, kv_lengths=torch.tensor(used[r]), sink=sink)

    wanted = ft.attention(q, k, v, mask=mask, sink=sink, backend="reference")
    found = simulate(3, job)
    assert all(torch.equal(x, found[0]) for x in found)
    assert float((found[0] - wanted).abs().max()) <= 1e-12


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": True}, ft.ShapeError, "causal: expected shards"),
        ({"dropout": 0.5}, ft.UnsupportedError, "dropout: expected 0"),
        ({"shards": Shards.zigzag(8, ranks=3)}, ft.ShapeError, "shards: expected those of 2 ranks"),
    ],
)
def test_refused(options: dict[str, Any], error: type, message: str) -> None:
    q, k, v = tensors(1, 4, np.random.default_rng(0))
    with pytest.raises(error, match=message):
        simulate(2, lambda group: distributed.decode(q, k, v, group=group, **options))


def test_gradients_are_refused() -> None:
    q, k, v = tensors(1, 4, np.random.default_rng(0))
    q.requires_grad_()
    with pytest.raises(ft.UnsupportedError, match="need no gradient"):
        simulate(2, lambda group: distributed.decode(q, k, v, group=group))
    simulate(2, lambda group: distributed.decode(q.detach(), k, v, group=group, out_dtype=np.float64))
