"""trace(): the events are those of the schedule, and the numbers are those of attention."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.numerics.schedule import FORWARD, STANDARD, Launch, Store, Tile, backward, standard_forward
from tests.support.grid import Case, Size, build

rng = np.random.default_rng(0)
q, k, v, dout = (rng.standard_normal(s) for s in ((13, 4), (17, 4), (17, 3), (13, 3)))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (3, 2), "softcap": 1.5},
    {"mask": rng.random((13, 17)) < 0.5, "sink": np.array([0.5])},
    {"kv_lengths": np.array([6]), "dropout": 0.3},
]


@pytest.mark.parametrize("order", FORWARD)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
def test_forward(order: str, options: dict[str, Any]) -> None:
    t = ft.trace(q, k, v, order=order, block_q=4, block_k=5, **options)
    assert [s.event for s in t] == list(FORWARD[order](t.band, t.grid))
    out, lse = ft.standard_attention(q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(t.results["out"], out, atol=1e-13)
    np.testing.assert_allclose(t.results["lse"], lse, atol=1e-13)
    n_k = int(options.get("kv_lengths", [17])[0])
    assert (t.grid.n_q, t.grid.n_k, t.grid.br, t.grid.bc) == (13, n_k, 4, 5) and t.order == order


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
def test_standard(options: dict[str, Any]) -> None:
    t = ft.trace(q, k, v, order="standard", block_q=4, **options)
    assert [s.event for s in t] == list(standard_forward(t.grid))
    assert [s.event for s in t if isinstance(s.event, Launch)] == list(STANDARD)
    out, lse = ft.standard_attention(q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(t.results["out"], out, atol=1e-13)
    np.testing.assert_allclose(t.results["lse"], lse, atol=1e-13)
    P = np.concatenate([s.numbers["P"] for s in t if isinstance(s.event, Store) and s.event.name == "P"])
    np.testing.assert_allclose(P, ft.probabilities(q, k, rows=range(13), **options)[:, : t.grid.n_k], atol=1e-13)


def test_numbers_of_the_tiles() -> None:
    t = ft.trace(q, k, v, block_q=4, block_k=5, causal=True)
    S = np.where(np.arange(17) <= np.arange(13)[:, None] + 4, q @ k.T * 0.5, -np.inf)
    running = np.full(13, -np.inf)
    for step in t:
        if isinstance(step.event, Tile):
            rows, cols = t.grid.rows(step.event.i), t.grid.cols(step.event.j)
            np.testing.assert_allclose(step.numbers["S"], S[rows, cols])
            running[rows] = np.maximum(running[rows], S[rows, cols].max(axis=1))
            np.testing.assert_allclose(step.numbers["m"], running[rows])
            np.testing.assert_allclose(step.numbers["P"], np.exp(S[rows, cols] - running[rows][:, None]))
        elif isinstance(step.event, Store):
            assert step.event.name in "OL"


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
def test_backward(options: dict[str, Any]) -> None:
    t = ft.trace(q, k, v, order="backward", dout=dout, block_q=4, block_k=5, **options)
    assert [s.event for s in t] == list(backward(t.band, t.grid))
    out, lse = ft.standard_attention(q, k, v, return_lse=True, **options)
    exact = ft.attention_backward(dout, q, k, v, out, lse, backend="reference", **options)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(t.results[name], getattr(exact, name), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("order", ["standard", "fa1", "fa2", "backward"])
def test_dtypes(order: str, dtype: str) -> None:
    call = build(Case(Size(1, 1, 1, 9, 8, 4, 4), dtype, ("causal",)))
    given = [x[0, 0] for x in (call.q, call.k, call.v)]
    t = ft.trace(*given, order=order, dout=call.dout[0, 0], causal=True, block_q=4, block_k=4)
    assert all(np.isfinite(x).all() for name, x in t.results.items() if name != "lse")


def test_steps_are_copies() -> None:
    t = ft.trace(q, k, v, block_q=4, block_k=5)
    tiles = [s for s in t if isinstance(s.event, Tile)]
    assert not any(np.shares_memory(a.numbers["O"], b.numbers["O"]) for a in tiles for b in tiles if a is not b)
    before = q.copy()
    np.testing.assert_array_equal(q, before)


def test_to_dict_is_json() -> None:
    t = ft.trace(q, k, v, causal=True, block_q=4, block_k=5)
    plain = json.loads(json.dumps(t.to_dict(), allow_nan=False))
    assert len(plain["steps"]) == len(t.steps)
    assert {s["event"] for s in plain["steps"]} == {"Load", "Zero", "Tile", "Store"}
    assert any(x == "-inf" for s in plain["steps"] if s["event"] == "Tile" for row in s["numbers"]["S"] for x in row)
