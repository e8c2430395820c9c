"""Arrays at odd addresses: the native core gets aligned elements, wherever the caller's begin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashtile.numerics.dtypes import FLOATS, accumulator, carrier
from flashtile.problem import describe
from tests.backends.native.core import needs_native
from tests.support.grid import Call, Case, Size, build
from tests.support.runners import api_runner

SIZES = (Size(2, 4, 2, 37, 70, 33, 17), Size(2, 8, 4, 1, 70, 64, 64))


def shifted(x: Any) -> Any:
    """A copy of x, one byte past an aligned address."""
    if not isinstance(x, np.ndarray):
        return x
    moved = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    assert moved.ctypes.data % 2
    return moved


def shifted_call(call: Call) -> Call:
    tensors = {name: shifted(getattr(call, name)) for name in ("q", "k", "v", "dout", "dlse")}
    return replace(call, **tensors, options={name: shifted(x) for name, x in call.options.items()})


def bits(call: Call, threads: int) -> list[bytes | None]:
    runner = api_runner("native", threads=threads)
    out, lse = runner.forward(call)
    found = (out, lse, *runner.backward(call, shifted(out), shifted(lse)))
    return [None if x is None else x.tobytes() for x in found]


def check_same_numbers(size: Size, dtype: str, threads: int = 1) -> None:
    call = build(Case(size, dtype, ("everything",)))
    assert bits(shifted_call(call), threads) == bits(call, threads)


@needs_native
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_numbers_are_the_same(size: Size, dtype: str) -> None:
    check_same_numbers(size, dtype)


@needs_native
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi", "sink", "cu_q", "cu_k"])
def test_arrays_lie_at_multiples_of_their_elements(name: str, dtype: str) -> None:
    from flashtile.backends.native.runner import laid_out

    real = carrier(accumulator(dtype))
    given: dict[str, Any] = {x: np.zeros((5, 2, 8), carrier(dtype)) for x in "qkv"}
    given |= {"bias": np.zeros((2, 2, 3, 3), carrier(dtype)), "alibi": np.zeros(2, real), "sink": np.zeros(2, real)}
    given |= {"cu_q": np.array([0, 2, 5]), "cu_k": np.array([0, 2, 5])}
    p = describe(**given)
    assert laid_out(p) is p  # no copy without need
    odd = laid_out(describe(**given | {name: shifted(given[name])}))
    for each in given:
        x = getattr(odd, each)
        assert x.ctypes.data % x.itemsize == 0
        assert np.shares_memory(x, given[each]) == (each != name)
