"""The oracle against the definition, score by score, and its gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from tests.support import brute_force
from tests.support.grid import COMBINATIONS, OPTIONS, Case, Size, build

SMALL = Size(2, 4, 2, 7, 9, 3, 2)
EVERY = (*((name,) for name in OPTIONS), *COMBINATIONS)
each_option = pytest.mark.parametrize("options", EVERY, ids="+".join)


@each_option
@pytest.mark.parametrize("size", [SMALL, Size(2, 2, 1, 9, 7, 2, 3)], ids=str)
def test_forward_is_the_definition(options: tuple[str, ...], size: Size) -> None:
    call = build(Case(size, "float64", options))
    out, lse = ft.standard_attention(call.q, call.k, call.v, return_lse=True, **call.options)
    exact_out, exact_lse, weights = brute_force.attention(call.q, call.k, call.v, **call.options)
    np.testing.assert_allclose(out, exact_out, atol=1e-13)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-13)
    rows = np.arange(size.n_q)
    P = ft.probabilities(call.q, call.k, rows=rows, **call.options)
    np.testing.assert_allclose(P, weights, atol=1e-13)


@each_option
def test_backward_is_the_slope(options: tuple[str, ...]) -> None:
    call = build(Case(SMALL, "float64", options))
    inputs = {"q": call.q, "k": call.k, "v": call.v}
    inputs |= {name: call.options[name] for name in ("bias", "sink") if name in call.options}
    if np.isneginf(inputs.get("sink", 0)).all():
        del inputs["sink"]  # minus infinity has no slope

    def loss(**changed: Any) -> float:
        given = inputs | changed
        rest = {name: x for name, x in (call.options | changed).items() if name not in "qkv"}
        out, lse, _ = brute_force.attention(given["q"], given["k"], given["v"], **rest)
        return float((out * call.dout).sum() + (lse * call.dlse)[np.isfinite(lse)].sum())

    out, lse = ft.standard_attention(call.q, call.k, call.v, return_lse=True, **call.options)
    grads = ft.attention_backward(
        call.dout, call.q, call.k, call.v, out, lse, dlse=call.dlse, backend="reference", **call.options
    )
    rng = np.random.default_rng(0)
    for name, x in inputs.items():
        along = rng.standard_normal(x.shape)
        slope = _slope(lambda t, name=name, x=x, along=along: loss(**{name: x + t * along}))
        assert (getattr(grads, "d" + name) * along).sum() == pytest.approx(slope, abs=1e-7, rel=1e-7), name


def _slope(f: Callable[[float], float], h: float = 1e-3) -> float:
    """Central differences of order 4."""
    return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)


def test_packed_is_each_sequence_alone() -> None:
    size = Size.packed(4, 2, 3, 2, (5, 7), (0, 3), (4, 0), (6, 2))
    call = build(Case(size, "float64", ("everything",)))
    out, lse = ft.standard_attention(call.q, call.k, call.v, return_lse=True, **call.packed, **call.options)
    cu_q, cu_k = call.packed["cu_q"], call.packed["cu_k"]
    for s, (n_q, n_k) in enumerate(size.lengths):
        q, k, v = (
            x[cu[s] : cu[s + 1]].swapaxes(0, 1)[None] for x, cu in ((call.q, cu_q), (call.k, cu_k), (call.v, cu_k))
        )
        # Dropout counts heads over the whole batch, so a sequence alone drops other weights: compare without it.
        alone = {name: x for name, x in call.options.items() if name not in ("dropout", "seed")}
        alone |= {"kv_lengths": alone["kv_lengths"][s : s + 1]}
        alone |= {name: alone[name][s : s + 1, :, :n_q, :n_k] for name in ("mask", "bias")}
        exact_out, exact_lse, _ = brute_force.attention(q, k, v, **alone)
        np.testing.assert_allclose(lse[cu_q[s] : cu_q[s + 1]], exact_lse[0].T, atol=1e-13)
        undropped = ft.standard_attention(
            call.q, call.k, call.v, **call.packed, **{n: x for n, x in call.options.items() if n != "dropout"}
        )
        np.testing.assert_allclose(undropped[cu_q[s] : cu_q[s + 1]], exact_out[0].swapaxes(0, 1), atol=1e-13)
    assert out.shape == (15, 4, 2) and lse.shape == (15, 4)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_precision_rounds(precision: str) -> None:
    """The yardstick is worse than the oracle, and by about as much as its dtype is."""
    from flashtile.backends import reference
    from tests.support.grid import EPS

    problem = build(Case(Size(2, 4, 2, 65, 63, 33, 17), "float64")).problem()
    exact, _ = reference.forward(problem)
    rounded, _ = reference.forward(problem, precision)
    assert EPS[precision] / 16 < np.abs(exact - rounded).max() < 16 * EPS[precision]
