"""A runner of the C++ core: the same bits as a fresh one, wherever the numbers of the next call lie."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.backends import native
from flashtile.host.arrays import NUMPY
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import BFLOAT16
from flashtile.problem import Problem, describe

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no C++ core")


def arrays(*shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def prepare(p: Problem) -> Any:
    return native.prepare(p, NUMPY)[0]


def alone(p: Problem) -> tuple[Any, Any]:
    run, inputs = native.prepare(p, NUMPY)
    found: tuple[Any, Any] = run.forward(inputs)
    return found


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (((2, 4, 33, 16), (2, 2, 40, 16), (2, 2, 40, 24)), {}),
    "one query": (((1, 8, 1, 64), (1, 2, 100, 64), (1, 2, 100, 64)), {"causal": True}),
    "rank 2": (((7, 8), (9, 8), (9, 8)), {"window": (3, 1), "softcap": 2.0, "scale": 0.3}),
    "dropout": (((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8)), {"dropout": 0.5, "seed": 3}),
    "large": (((1, 1, 20000, 2), (1, 1, 9, 2), (1, 1, 9, 2)), {}),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits(name: str, dtype: Any) -> None:
    shapes, options = CALLS[name]
    run = prepare(describe(*arrays(*shapes, dtype=dtype), **options))
    assert run.reusable
    for seed in (1, 2):
        more = options | ({"seed": seed} if "dropout" in options else {})
        p = describe(*arrays(*shapes, dtype=dtype, seed=seed), **more)
        out, lse = alone(p)
        for _ in range(2):
            same(run.forward(Inputs.of(p)), (out, lse))
        same(run.forward(Inputs.of(p), False), (out, None))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dlse", [False, True])
def test_gradients_have_the_same_bits(name: str, dlse: bool) -> None:
    shapes, options = CALLS[name]
    run = prepare(describe(*arrays(*shapes), **options))
    for seed in (1, 2):
        p = describe(*arrays(*shapes, seed=seed), **options)
        fresh, inputs = native.prepare(p, NUMPY)
        out, lse = fresh.forward(inputs)
        dout = np.random.default_rng(seed).standard_normal(out.shape).astype(np.float32)
        given = (dout, out, lse, np.ones_like(lse) if dlse else None)
        wanted = fresh.backward(inputs, *given)
        for _ in range(2):
            same(run.backward(Inputs.of(p), *given), wanted)
        spread = (np.repeat(dout, 2, -1)[..., ::2], np.asfortranarray(out), *given[2:])  # copied first
        same(run.backward(Inputs.of(p), *spread), wanted)
        odd = np.empty(dout.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(dout.shape)
        odd[...] = dout
        same(run.backward(Inputs.of(p), odd, *given[1:]), wanted)


def test_gradients_of_bias_and_sink() -> None:
    shapes = [(2, 2, 4, 8), (2, 2, 6, 8), (2, 2, 6, 8)]
    bias, sink = arrays((4, 6), (2,))
    p = describe(*arrays(*shapes), bias=bias, sink=sink)
    run, inputs = native.prepare(p, NUMPY)
    out, lse = run.forward(inputs)
    for _ in range(2):  # dbias is a sum that begins anew
        grads = run.backward(inputs, out, out, lse, None)
        wanted = ft.attention_backward(out, *arrays(*shapes), out, lse, bias=bias, sink=sink, backend="reference")
        assert grads.dbias.shape == (1, 1, 4, 6) and grads.dsink.shape == (2,)
        np.testing.assert_allclose(grads.dbias[0, 0], wanted.dbias, atol=1e-5)
        np.testing.assert_allclose(grads.dsink, wanted.dsink, atol=1e-5)
    assert run.backward(inputs, out, out, lse, None, bias_grad=False).dbias is None


def test_strides_stay() -> None:
    shapes = [(1, 20, 2, 8)] * 3
    run = prepare(describe(*(x.swapaxes(1, 2) for x in arrays(*shapes))))
    assert run.reusable
    p = describe(*(x.swapaxes(1, 2) for x in arrays(*shapes, seed=5)))
    same(run.forward(Inputs.of(p)), alone(p))


OTHERS: dict[str, Any] = {
    "bias": lambda rng: rng.standard_normal((4, 6)).astype(np.float32),
    "mask": lambda rng: rng.random((2, 1, 6)) < 0.7,
    "alibi": lambda rng: rng.random(2).astype(np.float32),
    "sink": lambda rng: rng.standard_normal(2).astype(np.float32),
}


@pytest.mark.parametrize("names", [*((name,) for name in OTHERS), tuple(OTHERS)], ids=" ".join)
def test_other_arrays(names: tuple[str, ...]) -> None:
    shapes = [(1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8)]

    def problem(seed: int) -> Problem:
        rng = np.random.default_rng(seed)
        return describe(*arrays(*shapes, seed=seed), **{name: OTHERS[name](rng) for name in names})

    run = prepare(problem(0))
    assert run.reusable
    p = problem(1)
    same(run.forward(Inputs.of(p)), alone(p))


def test_lengths() -> None:
    shapes = [(3, 2, 4, 8), (3, 2, 6, 8), (3, 2, 6, 8)]
    run = prepare(describe(*arrays(*shapes), causal=True, kv_lengths=np.array([6, 6, 6])))
    for lengths in ([6, 3, 1], [0, 6, 2]):
        p = describe(*arrays(*shapes, seed=2), causal=True, kv_lengths=np.array(lengths))
        same(run.forward(Inputs.of(p)), alone(p))
    for wrong in ([7, 1, 1], [1, -1, 1]):
        with pytest.raises(ft.ShapeError, match=r"^kv_lengths: expected values from 0 to the number of keys"):
            run.forward(Inputs.of(p)._replace(kv_lengths=np.array(wrong)))


def test_what_runs_once() -> None:
    """What has to be copied, packed sequences, and arrays without elements."""
    starts = np.array([0, 2, 5])
    q, k, v = arrays(*[(1, 2, 4, 8)] * 3)
    halves = arrays(*[(1, 2, 4, 8)] * 3, dtype=np.float16)
    for p in (
        describe(*arrays(*[(5, 2, 8)] * 3), cu_q=starts, cu_k=starts),
        describe(q[..., ::2], k[..., ::2], v[..., ::2]),
        describe(q[:, :, :0], k, v),
        describe(q, k[:, :, :0], v[:, :, :0]),
        describe(*halves, sink=np.ones(2, np.float16)),
        describe(q, k, v, alibi=np.ones(4, np.float32)[::2]),
    ):
        assert not prepare(p).reusable
        assert alone(p)[0].shape == p.in_caller_layout(np.empty(p.out_shape())).shape


def test_bfloat16_keeps_its_carrier() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (BFLOAT16, np.dtype(ml_dtypes.bfloat16)):
        x = np.zeros((1, 2, 4, 8), np.uint16).view(dtype)
        assert ft.attention(x, x, x).dtype == dtype


def test_no_array_is_kept() -> None:
    q, k, v, bias = arrays(*[(1, 2, 4, 8)] * 3, (4, 4))
    run, inputs = native.prepare(describe(q, k, v, bias=bias), NUMPY)
    run.forward(inputs)
    gone = [weakref.ref(x) for x in (q, k, v, bias)]
    del q, k, v, bias, inputs
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_threads_at_once() -> None:
    shapes = [(1, 4, 64, 32)] * 3
    run = prepare(describe(*arrays(*shapes)))
    problems = [describe(*arrays(*shapes, seed=seed)) for seed in range(8)]
    wanted = [alone(p)[0] for p in problems]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda p: [run.forward(Inputs.of(p))[0] for _ in range(20)], problems)
    for found, exact in zip(results, wanted, strict=True):
        for each in found:
            np.testing.assert_array_equal(each, exact)
