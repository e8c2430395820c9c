"""Element types: names, carriers, and the rounding of bfloat16 to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.numerics.dtypes import BFLOAT16, FLOATS, ITEMSIZE, accumulator, carrier, name_of, narrow, widen
from tests.support.grid import LAYOUTS, with_layout


def bits(x: Any) -> Any:
    return x.view(np.uint16)


@pytest.mark.parametrize("name", FLOATS)
def test_names_and_carriers(name: str) -> None:
    assert name_of(carrier(name)) == name == name_of(name)
    assert carrier(name).itemsize == ITEMSIZE[name]
    assert accumulator(name) == ("float64" if name == "float64" else "float32")


def test_names_of_others() -> None:
    assert name_of(np.float32) == "float32" and name_of(np.dtype(bool)) == "bool"
    assert name_of(np.dtype(np.uint16)) == "uint16", "plain integers are not bfloat16"
    torch = pytest.importorskip("torch")
    assert name_of(torch.bfloat16) == "bfloat16" and name_of(torch.bool) == "bool"


def test_every_bfloat16_survives() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(BFLOAT16)
    wide = widen(every)
    back = bits(narrow(wide, "bfloat16"))
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(back[number], bits(every)[number])
    assert np.isnan(widen(narrow(wide, "bfloat16")))[~number].all()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0x3F80_0000, 0x3F80),  # 1
        (0x3F80_7FFF, 0x3F80),  # just below a tie
        (0x3F80_8000, 0x3F80),  # a tie rounds to even: down
        (0x3F80_8001, 0x3F81),
        (0x3F81_8000, 0x3F82),  # up
        (0xBF81_8000, 0xBF82),
        (0x3FFF_FFFF, 0x4000),  # into the next exponent
        (0x7F7F_7FFF, 0x7F7F),  # the largest number
        (0x7F7F_8000, 0x7F80),  # overflow: infinity
        (0x7F80_0000, 0x7F80),
        (0xFF80_0000, 0xFF80),
        (0x0000_8000, 0x0000),  # subnormal ties
        (0x0001_8000, 0x0002),
        (0x8000_0000, 0x8000),  # minus zero
    ],
    ids=hex,
)
def test_rounding(value: int, expected: int) -> None:
    x = np.array([value], np.uint32).view(np.float32)
    assert bits(narrow(x, "bfloat16"))[0] == expected


@pytest.mark.parametrize("pattern", [0x7FC0_0000, 0x7F80_0001, 0xFFFF_FFFF, 0x7FFF_FFFF, 0xFF80_8000], ids=hex)
def test_nan_stays_nan(pattern: int) -> None:
    """Some patterns would round to infinity or wrap to zero if treated as numbers."""
    x = np.array([pattern], np.uint32).view(np.float32)
    assert np.isnan(widen(narrow(x, "bfloat16")))[0]


def test_rounding_equals_that_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([x, rng.standard_normal(100_000).astype(np.float32)])
    with np.errstate(invalid="ignore"):
        theirs = x.astype(ml_dtypes.bfloat16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(bits(narrow(x, "bfloat16"))[number], theirs.view(np.uint16)[number])
    assert np.isnan(widen(narrow(x, "bfloat16"))[~number]).all()
    np.testing.assert_array_equal(widen(theirs), theirs.astype(np.float32))


def test_ml_dtypes_arrays_are_accepted() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(ml_dtypes.bfloat16) for n in (5, 7, 7))
    out, lse = ft.attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32
    ours = ft.attention(*(x.view(BFLOAT16) for x in (q, k, v)), causal=True)
    assert ours.dtype == BFLOAT16
    np.testing.assert_array_equal(bits(ours), out.view(np.uint16))
    bias, sink = np.zeros((5, 7), ml_dtypes.bfloat16), np.zeros(2, ml_dtypes.bfloat16)
    out, lse = ft.attention(q, k, v, bias=bias, sink=sink, return_lse=True)
    grads = ft.attention_backward(out, q, k, v, out, lse, bias=bias, sink=sink)
    assert all(x.dtype == ml_dtypes.bfloat16 for x in grads)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_shapes(layout: str) -> None:
    x = with_layout(narrow(np.random.default_rng(2).standard_normal((2, 3, 4, 5)), "bfloat16"), layout)
    wide = widen(x, np.float64)
    assert wide.shape == x.shape and wide.dtype == np.float64
    np.testing.assert_array_equal(bits(narrow(wide, "bfloat16")), np.ascontiguousarray(x).view(np.uint16))
    assert narrow(wide.astype(np.float32)[0, ::2, ::-1], "bfloat16").shape == (2, 4, 5)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)], ids=str)
def test_empty_and_scalar(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    assert narrow(x, "bfloat16").shape == shape == widen(narrow(x, "bfloat16")).shape


def test_no_needless_copy() -> None:
    x = np.zeros(4, np.float32)
    assert widen(x) is x and narrow(x, "float32") is x
    y = narrow(x, "bfloat16")
    assert narrow(y, "bfloat16") is y


def test_float16_overflows_without_a_warning() -> None:
    np.testing.assert_array_equal(narrow(np.array([1e6, -1e6], np.float32), "float16"), [np.inf, -np.inf])
