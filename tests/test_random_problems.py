"""Hypothesis over whole problems: for any valid call, every backend agrees with the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile as ft
from flashtile.band import FAR
from flashtile.numerics.dtypes import accumulator, narrow
from tests.support.grid import LAYOUTS, Call, check_backward, check_forward, truth_of, with_layout
from tests.support.runners import Runner, every_runner, tiles_runner

edges = st.integers(-12, 40) | st.just(FAR)
bands = st.builds(ft.Band, edges, edges, st.integers(-50, 50))


@st.composite
def calls(draw: Any) -> Call:
    """Draw a call with any sizes from 0, heads, strides, and options, alone and combined."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float64", "float64", "float32", "bfloat16", "float16"]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    heads = kv_heads * group
    dim, dim_v = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    lengths = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=3))
    n_q, n_k = max(q for q, _ in lengths), max(k for _, k in lengths)
    sequences, packed = len(lengths), {}
    if draw(st.booleans()):
        cu_q, cu_k = (np.cumsum([0, *n]) for n in zip(*lengths, strict=True))
        packed = {"cu_q": cu_q, "cu_k": cu_k}
        room = np.diff(cu_k)
        q_shape, k_shape = (int(cu_q[-1]), heads), (int(cu_k[-1]), kv_heads)
    else:
        room = np.full(sequences, n_k)
        q_shape, k_shape = (sequences, heads, n_q), (sequences, kv_heads, n_k)

    def array(*shape: int, dtype: str = dtype) -> Any:
        x = narrow(rng.standard_normal(shape), dtype)
        return with_layout(x, draw(st.sampled_from(LAYOUTS))) if len(shape) > 2 and x.size else x

    def some_axes() -> list[int]:
        return [n if draw(st.booleans()) else 1 for n in (sequences, heads, n_q, n_k)]

    options: dict[str, Any] = {}
    match draw(st.sampled_from(["", "causal", "window", "both", "band"])):
        case "causal":
            options["causal"] = True
        case "window" | "both" as shape:
            side = st.integers(0, 30) | st.none()
            options |= {"window": (draw(side), draw(side)), "causal": shape == "both"}
        case "band":
            options["band"] = draw(bands)
    wide = accumulator(dtype)
    if draw(st.booleans()):
        options["mask"] = with_layout(rng.random(some_axes()) < draw(st.sampled_from([0.0, 0.3, 0.9])), "transposed")
    if draw(st.booleans()):
        options["bias"] = array(*some_axes(), dtype=draw(st.sampled_from([dtype, wide])))
    if draw(st.booleans()):
        options["alibi"] = np.abs(rng.standard_normal(draw(st.sampled_from([(heads,), (sequences, heads)])))).astype(
            wide
        )
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    if draw(st.booleans()):
        options["sink"] = array(heads, dtype=wide)
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-1, 1))
    if draw(st.booleans()):
        options |= {"dropout": draw(st.sampled_from([0.1, 0.5, 0.9])), "seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.booleans()):
        place, head, step = st.integers(0, 1 << 20), draw(st.integers(0, 3)), st.integers(1, 5)
        options["origin"] = ft.Origin(draw(place), draw(place), head, draw(place), heads + head, draw(step), draw(step))
    if draw(st.booleans()):
        options["kv_lengths"] = rng.integers(0, room + 1)
    out_dtype = dtype
    if draw(st.booleans()):
        options["out_dtype"] = out_dtype = wide
    q, k, v = array(*q_shape, dim), array(*k_shape, dim), array(*k_shape, dim_v)
    return Call(q, k, v, options, array(*q_shape, dim_v, dtype=out_dtype), array(*q_shape, dtype=wide), packed)


def agree(call: Call, runner: Runner) -> None:
    exact = truth_of(call)
    # Small problems measure the error of standard attention on few numbers: allow at least the dtype's rounding.
    rounding = {"float64": 0.0, "float32": 2e-6, "bfloat16": 4e-2, "float16": 5e-3}[call.problem().dtype]
    largest = max(1.0, *(float(np.abs(np.nan_to_num(x, neginf=0)).max(initial=0)) for x in (exact.out, exact.lse)))
    gradients = [np.abs(x).max(initial=0) for x in exact.grads.values() if x is not None]
    exact = replace(
        exact,
        error={
            name: max(error, rounding * (max(largest, *map(float, gradients)) if name.startswith("d") else largest))
            for name, error in exact.error.items()
        },
    )
    out, lse = runner.forward(call)
    check_forward(call, exact, out, lse)
    check_backward(call, exact, runner.backward(call, out, lse))


@every_runner
def test_any_problem(runner: Runner) -> None:
    if runner.name == "reference":
        pytest.skip("it is the oracle")
    given(calls())(lambda call: agree(call, runner))()


@given(calls(), st.sampled_from(["fa1", "fa2"]), st.integers(1, 33), st.integers(1, 33))
@settings(max_examples=max(60, settings().max_examples // 2))
def test_any_tiles(call: Call, order: str, block_q: int, block_k: int) -> None:
    agree(call, tiles_runner(order, block_q, block_k))
