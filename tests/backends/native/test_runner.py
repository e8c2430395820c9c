"""Small calls that come again: the same bits as by the long way, wherever the numbers lie."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from flashtile.backends import native
from flashtile.backends.native import runner
from flashtile.problem import Problem, describe

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no C++ core")


def arrays(*shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def again(core: runner.Prepared, p: Problem, with_lse: bool = True) -> tuple[Any, Any]:
    """What it makes of the arrays of a problem like the one it was made for."""
    out = np.full(p.out_shape(), np.nan, p.q.dtype)
    lse = np.full(p.out_shape()[:-1], np.nan, p.accumulator)
    places = (x.ctypes.data for x in (p.q, p.k, p.v, out))
    core(1, p.seed, *places, lse.ctypes.data if with_lse else None)
    return out, lse


CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (((2, 4, 33, 16), (2, 2, 40, 16), (2, 2, 40, 24)), {}),
    "one query": (((1, 8, 1, 64), (1, 2, 100, 64), (1, 2, 100, 64)), {"causal": True}),
    "rank 2": (((7, 8), (9, 8), (9, 8)), {"window": (3, 1), "softcap": 2.0, "scale": 0.3}),
    "dropout": (((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8)), {"dropout": 0.5, "seed": 3}),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits(name: str, dtype: Any) -> None:
    shapes, options = CALLS[name]
    core = native.small(describe(*arrays(*shapes, dtype=dtype), **options))
    assert core is not None
    for seed in (1, 2):
        more = options | ({"seed": seed} if "dropout" in options else {})
        p = describe(*arrays(*shapes, dtype=dtype, seed=seed), **more)
        out, lse = native.forward(p)
        for found in (again(core, p), again(core, p)):
            np.testing.assert_array_equal(found[0], out)
            np.testing.assert_array_equal(found[1], lse)
        found = again(core, p, with_lse=False)
        np.testing.assert_array_equal(found[0], out)
        assert np.isnan(found[1]).all()


def test_strides_stay() -> None:
    q, k, v = arrays(*[(1, 20, 2, 8)] * 3)
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    core = native.small(describe(*turned))
    assert core is not None
    p = describe(*(x.swapaxes(1, 2) for x in arrays(*[(1, 20, 2, 8)] * 3, seed=5)))
    np.testing.assert_array_equal(again(core, p)[0], native.forward(p)[0])


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

    core = native.small(problem(0))
    assert core is not None and {*core.others} == {*names}
    p = problem(1)
    out, lse = np.full(p.out_shape(), np.nan, np.float32), np.full(p.out_shape()[:-1], np.nan, np.float32)
    places = (x.ctypes.data for x in (p.q, p.k, p.v, out, lse))
    core(1, 0, *places, [getattr(p, name).ctypes.data for name in core.others])
    wanted = native.forward(p)
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(lse, wanted[1])


@pytest.mark.parametrize(
    "options",
    [
        {"sink": np.ones(2, np.float16)},
        {"alibi": np.ones(4, np.float32)[::2]},
    ],
    ids=["a sink that is widened", "slopes apart"],
)
def test_what_has_to_be_copied_is_not_prepared(options: dict[str, Any]) -> None:
    dtype = np.float16 if "sink" in options else np.float32
    assert native.small(describe(*arrays(*[(1, 2, 4, 8)] * 3, dtype=dtype), **options)) is None


def test_lengths() -> None:
    shapes = [(3, 2, 4, 8), (3, 2, 6, 8), (3, 2, 6, 8)]
    core = native.small(describe(*arrays(*shapes), causal=True, kv_lengths=np.array([6, 6, 6])))
    assert core is not None
    for lengths in ([6, 3, 1], [0, 6, 2]):
        p = describe(*arrays(*shapes, seed=2), causal=True, kv_lengths=np.array(lengths))
        out = np.full(p.out_shape(), np.nan, np.float32)
        core(1, 0, *(x.ctypes.data for x in (p.q, p.k, p.v, out)), None, (), lengths)
        np.testing.assert_array_equal(out, native.forward(p)[0])


def test_what_else_is_not_prepared() -> None:
    starts = np.array([0, 2, 5])
    assert native.small(describe(*arrays(*[(5, 2, 8)] * 3), cu_q=starts, cu_k=starts)) is None
    q, k, v = arrays(*[(1, 2, 4, 8)] * 3)
    assert native.small(describe(q[..., ::2], k[..., ::2], v[..., ::2])) is None  # they are copied
    assert native.small(describe(q[:, :, :0], k, v)) is None
    assert native.small(describe(q, k[:, :, :0], v[:, :, :0])) is None
    rows = runner.MOST_ROWS
    assert native.small(describe(*arrays((1, 1, rows, 2), (1, 1, 1, 2), (1, 1, 1, 2)))) is not None
    assert native.small(describe(*arrays((1, 1, rows + 1, 2), (1, 1, 1, 2), (1, 1, 1, 2)))) is None


def test_threads_at_once() -> None:
    shapes = [(1, 4, 64, 32)] * 3
    core = native.small(describe(*arrays(*shapes)))
    assert core is not None
    problems = [describe(*arrays(*shapes, seed=seed)) for seed in range(8)]
    wanted = [native.forward(p)[0] for p in problems]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda p: [again(core, p, with_lse=False)[0] for _ in range(20)], problems)
    for found, exact in zip(results, wanted, strict=True):
        for each in found:
            np.testing.assert_array_equal(each, exact)
