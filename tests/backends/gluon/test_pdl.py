"""Programmatic dependent launch on Hopper: the kernels of a pass in order, and which are launched with it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.backends.gluon.offline import Case, start_call


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        (Case(128, "causal"), ["forward", "recompute_forward"]),
        (Case(128, "causal descale", "float8_e4m3fn"), ["transpose", "forward", "recompute_forward"]),
        (Case(128, "causal", work="backward"), ["begin", "backward", "finish", "recompute_sums", "recompute_backward"]),
        (Case(256, "packed", work="backward"), ["begin", "backward", "finish", "recompute_sums", "recompute_backward"]),
    ],
    ids=["forward", "8 bits", "backward", "packed"],
)
def test_each_kernel_begins_in_the_tail_of_the_one_before(launched: list[Any], case: Case, kernels: list[str]) -> None:
    start_call(case)
    assert [(name, follows) for name, follows, _ in launched] == [(name, n > 0) for n, name in enumerate(kernels)]
