"""The compile-time constants of the forward kernel on Hopper."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gluon import tuning  # noqa: E402
from flashtile.backends.gluon.forward import constants  # noqa: E402
from flashtile.problem import describe  # noqa: E402


def compiled_for(n: int, dim: int, dim_v: int | None = None, packed: bool = False) -> Any:
    shape = (n, 2) if packed else (1, 2, n)
    q, k, v = (torch.empty(*shape, d, dtype=torch.bfloat16) for d in (dim, dim, dim_v or dim))
    starts = torch.tensor([0, n], dtype=torch.int32)
    p = describe(q, k, v, **({"cu_q": starts, "cu_k": starts} if packed else {}))
    heads = tuning.packed_heads(p)
    return constants(p, tuning.forward_of(p, heads), heads)


@pytest.mark.parametrize(
    ("n", "dim", "short"),
    [(1024, 64, True), (384, 64, False), (16384, 64, True), (1024, 128, False), (1000, 128, False), (960, 128, True)],
)
def test_tasks_that_have_no_rows_for_a_warpgroup(n: int, dim: int, short: bool) -> None:
    """Three warpgroups have 192 rows at head dim 64, two have 128."""
    assert compiled_for(n, dim).MAY_BE_EMPTY.value is short


def test_a_packed_sequence_may_end_anywhere() -> None:
    assert compiled_for(384, 64, packed=True).MAY_BE_EMPTY.value is True


@pytest.mark.parametrize(("dim", "dim_v", "parts"), [(256, 256, 2), (256, 128, 1), (128, 256, 2), (128, 128, 1)])
def test_an_output_too_wide_for_its_buffer_leaves_in_parts(dim: int, dim_v: int, parts: int) -> None:
    assert compiled_for(1024, dim, dim_v).OUT_PARTS.value == parts
