"""attention() of shards: which method "auto" is, layouts, autocast, results without gradients, and errors."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashtile as ft  # noqa: E402
from flashtile import distributed  # noqa: E402
from flashtile.distributed import Shards, context_parallel  # noqa: E402
from flashtile.distributed.arguments import Arguments  # noqa: E402
from flashtile.distributed.plan import Method  # noqa: E402
from tests.support.simulated_ranks import simulate  # noqa: E402


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "tokens", "method"),
    [
        (8, 32, 8, 1024, Method(8, 1)),
        (8, 32, 4, 1024, Method(1, 8, gather=True)),  # key heads do not divide
        (2, 32, 4, 1024, Method(1, 2, gather=True)),  # heads are more than two ranks' keys
        (16, 32, 8, 1 << 22, Method(1, 16)),  # too much to gather
    ],
)
def test_auto(ranks: int, heads: int, kv_heads: int, tokens: int, method: Method) -> None:
    q, k = (torch.empty(1, n, tokens // ranks, 64, device="meta", dtype=torch.bfloat16) for n in (heads, kv_heads))
    call = Arguments(q, k, k, {}, 4, False)
    assert context_parallel.method_of("auto", ranks, Shards.contiguous(tokens, ranks=ranks), call) == method


def test_auto_runs() -> None:
    shards = Shards.zigzag(30, ranks=3)
    x = torch.randn(1, 3, 30, 8)
    parts = simulate(
        3, lambda group: distributed.attention(*[shards.shard(x, group.rank())] * 3, group=group, shards=shards)
    )
    assert torch.allclose(shards.restore(parts), ft.attention(x, x, x), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axis", "layout"), [((20, 3, 8), 0, "bnhd"), ((3, 20, 8), 1, None), ((20, 8), 0, None)]
)
def test_fewer_axes(shape: tuple[int, ...], axis: int, layout: str | None) -> None:
    """Packed tokens are (tokens, heads, dim)."""
    documents = [7, 13]
    shards = Shards.contiguous(documents=documents, ranks=3)
    x = torch.randn(shape)

    def job(group: Any) -> Any:
        part = shards.shard(x, group.rank(), axis)
        return distributed.attention(
            part, part, part, group=group, shards=shards, causal=True, layout=layout, return_lse=True
        )

    out, lse = (shards.restore(parts, axis) for parts in zip(*simulate(3, job), strict=True))
    spans = ft.masks.documents(lengths=torch.tensor(documents))
    wanted = ft.attention(x, x, x, spans=spans, causal=True, layout=layout, return_lse=True)
    assert torch.allclose(out, wanted[0], atol=1e-6) and torch.allclose(lse, wanted[1], atol=1e-6)


def test_autocast_and_partial_results() -> None:
    shards = Shards.striped(24, ranks=2)
    x = torch.randn(1, 2, 24, 8)

    def job(group: Any) -> Any:
        part = shards.shard(x, group.rank())
        with torch.autocast("cpu", torch.bfloat16):
            narrow = distributed.attention(part, part, part, group=group, shards=shards)
        wide = distributed.attention(*[part.bfloat16()] * 3, group=group, shards=shards, out_dtype="float32")
        return narrow, wide

    for narrow, wide in simulate(2, job):
        assert narrow.dtype is torch.bfloat16 and wide.dtype is torch.float32
        assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"method": "fast"}, ft.ShapeError, "method: expected auto, gather, ring, ulysses"),
        ({"method": (2, 2)}, ft.ShapeError, "two sizes whose product is 2"),
        ({"shards": Shards.zigzag(16, ranks=3)}, ft.ShapeError, "shards: expected those of 2 ranks"),
        ({"shards": 16}, ft.DTypeError, "shards: expected a flashtile.distributed.Shards"),
        ({"mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)}, ft.ShapeError, "mask: expected"),
        ({"bias": torch.ones(1, 1, 1, 8, dtype=torch.int64)}, ft.DTypeError, "bias: expected float32"),
        ({"alibi": torch.ones(3)}, ft.ShapeError, "alibi: expected shape"),
        ({"kv_lengths": [17]}, ft.ShapeError, "kv_lengths: expected values from 0"),
        ({"spans": ft.Spans(torch.zeros(5).int(), torch.ones(5).int())}, ft.ShapeError, "spans: expected 1 or 16"),
        ({"descale": (1.0, 1.0, 1.0)}, ft.FlashtileError, "q, k, v|descale"),
        ({"backend": "sdpa", "sink": torch.ones(2)}, ft.UnsupportedError, "sink: the sdpa backend"),
    ],
    ids=str,
)
def test_refused(more: dict[str, Any], error: type, message: str) -> None:
    x = torch.randn(1, 2, 8, 8)
    options = {"shards": Shards.zigzag(16, ranks=2), **more}
    with pytest.raises(error, match=message):
        simulate(2, lambda group: distributed.attention(x, x, x, group=group, **options))
