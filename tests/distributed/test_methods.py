"""Every method gives the results of one process, for any shards and options: on simulated ranks, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import flashtile as ft  # noqa: E402
from flashtile.distributed import Shards  # noqa: E402
from tests.support import sharded  # noqa: E402
from tests.support.simulated_ranks import simulate  # noqa: E402

MAKERS = ("contiguous", "zigzag", "striped", "balanced")


def methods(ranks: int) -> list[Any]:
    return ["gather", "ring", "ulysses", *((a, ranks // a) for a in range(2, ranks) if ranks % a == 0)]


def option(name: str, n: int, heads: int, rng: np.random.Generator) -> dict[str, Any]:
    """An option of a call of n tokens, two sequences and some heads."""

    def numbers(*shape: int) -> Any:
        return torch.tensor(rng.standard_normal(shape))

    def booleans(*shape: int) -> Any:
        return torch.tensor(rng.random(shape) < 0.7)

    def spans(batch: int, some_heads: int, count: int) -> ft.Spans:
        ends = np.sort(rng.integers(0, n + 2, (batch, some_heads, n, 2 * count)), -1)
        return ft.Spans(torch.tensor(ends[..., ::2]), torch.tensor(ends[..., 1::2]))

    return {
        "causal": lambda: {"causal": True},
        "window": lambda: {"window": (int(rng.integers(0, 9)), int(rng.integers(0, 5)))},
        "causal window": lambda: {"causal": True, "window": (int(rng.integers(0, 9)), None)},
        "band": lambda: {"band": ft.Band(*(int(x) for x in rng.integers(0, 9, 2)), int(rng.integers(-5, 6)))},
        "spans": lambda: {"spans": spans(1, 1, 2)},
        "spans of heads": lambda: {"spans": spans(2, heads, 3), "causal": True},
        "alibi": lambda: {"alibi": numbers(heads).abs()},
        "alibi of sequences": lambda: {"alibi": numbers(2, heads).abs(), "causal": True},
        "softcap": lambda: {"softcap": 2.5, "scale": 0.7},
        "sink": lambda: {"sink": numbers(heads)},
        "bias of keys": lambda: {"bias": numbers(1, 1, 1, n)},
        "bias of keys and heads": lambda: {"bias": numbers(2, heads, 1, n)},
        "bias of pairs": lambda: {"bias": numbers(1, heads, n, n)},
        "mask of keys": lambda: {"mask": booleans(2, 1, 1, n)},
        "mask of pairs": lambda: {"mask": booleans(2, 1, n, n)},
        "padding": lambda: {"key_padding_mask": booleans(2, n)},
        "dropout": lambda: {"dropout": 0.4, "seed": int(rng.integers(0, 2**63))},
        "lengths": lambda: {"kv_lengths": torch.tensor(rng.integers(0, n + 1, 2))},
    }[name]()


OPTIONS = (
    *("causal", "window", "causal window", "band", "spans", "spans of heads", "alibi", "alibi of sequences", "softcap"),
    *("sink", "bias of keys", "bias of keys and heads", "bias of pairs", "mask of keys", "mask of pairs", "padding"),
    *("lengths", "dropout"),
)


@st.composite
def options(draw: Any, n: int, heads: int) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(OPTIONS), max_size=4, unique=True))
    found: dict[str, Any] = {}
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    for name in names:
        more = option(name, n, heads, rng)
        banded = {"causal", "window", "band"}
        if not ((banded & more.keys() and banded & found.keys()) or more.keys() & found.keys()):
            found |= more
    if "key_padding_mask" in found and "mask" in found:
        del found["mask"]
    return found


@settings(max_examples=150)
@given(st.data())
def test_any_call(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=3), label="lengths")
    ranks = data.draw(st.integers(1, 6), label="ranks")
    heads, kv_heads = data.draw(st.sampled_from([(4, 2), (6, 6), (3, 1), (6, 2)]), label="heads")
    chosen = data.draw(options(sum(lengths), heads), label="options")
    maker = data.draw(st.sampled_from(MAKERS), label="shards")
    method = data.draw(st.sampled_from(methods(ranks)), label="method")
    check(lengths, ranks, heads, kv_heads, chosen, maker, method, data.draw(st.booleans()), data.draw(st.booleans()))


def check(
    lengths: list[int],
    ranks: int,
    heads: int,
    kv_heads: int,
    chosen: dict[str, Any],
    maker: str,
    method: Any,
    dlse: bool = False,
    bnhd: bool = False,
) -> None:
    whole = sharded.make(lengths, heads, kv_heads, chosen, dlse=dlse)
    shards = getattr(Shards, maker)(documents=lengths, ranks=ranks)
    more = {"layout": "bnhd"} if bnhd else {}
    of_pairs = any(name in chosen and chosen[name].shape[2] != 1 for name in ("mask", "bias"))
    if of_pairs and ranks > 1 and method not in ("gather", "ring"):
        with pytest.raises(ft.UnsupportedError, match="exchanges heads"):
            simulate(ranks, lambda group: sharded.on_rank(whole, group, shards, method, **more))
        return
    parts = simulate(ranks, lambda group: sharded.on_rank(whole, group, shards, method, **more))
    errors = sharded.largest_error(sharded.joined(parts, shards, whole), sharded.in_one_process(whole, lengths))
    assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_by_each_method(name: str) -> None:
    lengths, heads = [9, 17, 6], 4
    chosen = option(name, sum(lengths), heads, np.random.default_rng(5))
    for method in methods(4):
        for maker in ("contiguous", "zigzag", "striped"):
            check(lengths, 4, heads, 2, chosen, maker, method)


def root_mean_square(x: Any) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("method", ["gather", "ring", (8, 4)], ids=str)
def test_bfloat16_on_32_ranks(method: Any) -> None:
    """Errors are those of one call: partial results and gradients are not rounded."""
    lengths = [512]
    whole = sharded.make(lengths, 8, 2, {"causal": True}, torch.bfloat16, batch=1, dim=32, dim_v=32)
    exact = sharded.Whole(*(x.double() for x in (whole.q, whole.k, whole.v, whole.dout)), None, whole.options)
    wanted = sharded.in_one_process(exact, lengths)
    once = sharded.in_one_process(whole, lengths, "auto")
    shards = Shards.zigzag(512, ranks=32)
    parts = simulate(32, lambda group: sharded.on_rank(whole, group, shards, method))
    found = sharded.joined(parts, shards, whole)
    for name in ("out", "q", "k", "v"):
        error, of_one = (root_mean_square(x[name].double() - wanted[name]) for x in (found, once))
        print(method, name, error / of_one)
        assert error <= 1.05 * of_one, (name, error / of_one)


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses", (2, 2)], ids=str)
def test_deterministic(method: Any) -> None:
    options = {"causal": True, "deterministic": True, "dropout": 0.1, "seed": 3, "sink": torch.randn(4)}
    whole = sharded.make([100, 60], 4, 2, options, torch.float32)
    shards = Shards.balanced(documents=[100, 60], ranks=4, causal=True)
    first, *more = (simulate(4, lambda group: sharded.on_rank(whole, group, shards, method)) for _ in range(3))
    for again in more:
        for x, y in zip(first, again, strict=True):
            assert all(torch.equal(x[name], y[name]) for name in x)


def test_methods_drop_the_same_weights() -> None:
    """Keys with values of their own show which weights were dropped, bit for bit."""
    n = 40
    whole = sharded.make([n], 2, 1, {"dropout": 0.5, "seed": 11}, batch=1, dim=4, dim_v=n)
    whole.v[:] = torch.eye(n)
    dropped = sharded.in_one_process(whole, [n])["out"] == 0
    assert 0.4 < float(dropped.double().mean()) < 0.6
    for maker in MAKERS[:3]:
        shards = getattr(Shards, maker)(n, ranks=3)
        for method in methods(3):
            parts = simulate(3, lambda group: sharded.on_rank(whole, group, shards, method))  # noqa: B023
            assert torch.equal(sharded.joined(parts, shards, whole)["out"] == 0, dropped)
