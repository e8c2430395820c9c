"""The kernel of merge() of tensors, against the formula: interpreted here, for real with -m gpu."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.backends.triton.kernels import DEVICE

torch = pytest.importorskip("torch")

from flashtile.backends.triton import merge_results  # noqa: E402
from flashtile.pytorch.merge import merge  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
CASES = [
    ((2, 3, 9), 16, 2, torch.float32),
    ((5,), 33, 2, torch.float32),
    ((), 8, 2, torch.float64),
    ((2, 2, 2, 3), 300, 2, torch.float32),
    ((7, 4), 16, 3, torch.float32),
    ((130, 3), 1, 4, torch.float64),
    ((0, 3), 16, 2, torch.float32),
    ((3, 2), 0, 2, torch.float32),
]


def results(shape: tuple[int, ...], width: int, count: int, dtype: Any) -> list[Any]:
    """Results in any order of axes, with rows that saw no key; every second one of 16 bits."""
    rng, found = np.random.default_rng(1), []
    for n in range(count):
        lse = torch.tensor(rng.standard_normal(shape), dtype=dtype)
        lse[torch.tensor(rng.random(shape) < 0.3)] = -torch.inf
        out = torch.tensor(rng.standard_normal((*shape, width)), dtype=torch.bfloat16 if n % 2 else dtype)
        out[lse == -torch.inf] = torch.nan
        if len(shape) > 1:
            out, lse = (x.swapaxes(0, 1).contiguous().swapaxes(0, 1) for x in (out, lse))
        found += [out.to(DEVICE), lse.to(DEVICE)]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "width", "count", "dtype"), CASES)
def test_on_a_gpu(shape: tuple[int, ...], width: int, count: int, dtype: Any) -> None:
    check(shape, width, count, dtype)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels under Triton's interpreter")
@pytest.mark.parametrize(("shape", "width", "count", "dtype"), CASES)
def test_interpreted(shape: tuple[int, ...], width: int, count: int, dtype: Any) -> None:
    check(shape, width, count, dtype)


def check(shape: tuple[int, ...], width: int, count: int, dtype: Any) -> None:
    given = results(shape, width, count, dtype)
    wanted = merge(tuple(x.cpu().double() for x in given), None)
    apart = torch.empty(*shape, width, device=DEVICE, dtype=dtype), torch.empty(shape, device=DEVICE, dtype=dtype)
    for into in (apart, (given[0], given[1])):  # in place last
        assert merge_results.merge(tuple(given), into)
        error = 1e-13 if dtype is torch.float64 else 1e-6
        for found, exact in zip(into, wanted, strict=True):
            torch.testing.assert_close(found.cpu().double(), exact, atol=error, rtol=error)


def test_too_many_results_and_axes() -> None:
    assert not merge_results.merge((torch.zeros(2, 3), torch.zeros(2)) * 9, (torch.zeros(2, 3), torch.zeros(2)))
    scattered = torch.zeros(9, 9, 9, 9, 4)[::2, ::2, ::2, ::2]
    assert not merge_results.merge((scattered, scattered[..., 0]) * 2, (scattered, scattered[..., 0]))


def test_axes_that_lie_as_one() -> None:
    assert merge_results.fold((2, 3, 4), [(12, 4, 1), (24, 8, 2)]) == ((24,), [(1,), (2,)])
    assert merge_results.fold((2, 3, 4), [(12, 4, 1), (4, 8, 1)]) == ((2, 3, 4), [(12, 4, 1), (4, 8, 1)])
    assert merge_results.fold((2, 1, 4), [(4, 9, 1)]) == ((8,), [(1,)])
    assert merge_results.fold((), [()]) == ((), [()])
