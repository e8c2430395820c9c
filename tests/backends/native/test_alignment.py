"""Arrays at odd addresses: the native core gets aligned elements, wherever the caller's begin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashtile.backends import native
from flashtile.numerics.dtypes import FLOATS, carrier
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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pack", [native._rows, native._pairs])
def test_tensors_are_aligned(pack: Any, dtype: str) -> None:
    x: Any = np.zeros((1, 2, 3, 4), carrier(dtype))
    alive: list[Any] = []
    assert pack(x, alive)[0] == x.ctypes.data and not alive  # no needless copy
    assert pack(shifted(x), alive)[0] % x.itemsize == 0 and len(alive) == 1


@pytest.mark.parametrize("dtype", ["int64", "float32", "float64"])
def test_small_arrays_are_aligned(dtype: str) -> None:
    x: Any = np.zeros(3, dtype)
    assert native._plain(shifted(x), dtype, []) % x.itemsize == 0
