"""The search for set flags: one program finds each of them, once."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from flashtile.backends.gpu.nonfinite_kernels import FLAGS_AT_ONCE, next_flagged  # noqa: E402
from tests.backends.triton.kernels import DEVICE  # noqa: E402

PROGRAMS = 3


@triton.jit
def count_kernel(flags: Any, found: Any, count: Any) -> None:
    n = next_flagged(flags, tl.program_id(0), count)
    while n < count:
        tl.store(found + n, tl.load(found + n) + 1)
        n = next_flagged(flags, n + tl.num_programs(0), count)


@pytest.mark.parametrize("count", [1, 2, PROGRAMS * FLAGS_AT_ONCE.value, 2 * PROGRAMS * FLAGS_AT_ONCE.value + 5])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_each_flag_is_found_once(share: float, count: int) -> None:
    torch.manual_seed(0)
    flags = (torch.rand(count + 1) < share).int().to(DEVICE)
    flags[-1] = 1  # beyond the last
    found = torch.zeros_like(flags)
    count_kernel[(PROGRAMS,)](flags, found, count)
    assert torch.equal(found[:-1], flags[:-1]) and not found[-1]
