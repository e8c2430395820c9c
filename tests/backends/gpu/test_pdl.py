"""Programmatic dependent launch: the kernels of a pass in order, and which are launched with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile import dispatch  # noqa: E402
from flashtile.backends.gpu import pdl  # noqa: E402
from flashtile.problem import describe  # noqa: E402


@pytest.mark.parametrize(
    ("architecture", "can"),
    [((9, 0), True), ((10, 0), True), ((12, 0), True), ((8, 9), False), ("gfx942", False), (None, False)],
)
def test_which_gpus_support_pdl(architecture: Any, can: bool, on_gpu: Callable[[Any], None]) -> None:
    on_gpu(architecture)
    assert pdl.supports_pdl(torch.device("cpu")) is can


def problem(n_q: int, n_k: int, **options: Any) -> Any:
    q, k, v = (torch.zeros(2, 2, n, 16, dtype=torch.bfloat16) for n in (n_q, n_k, n_k))
    return describe(q, k, v, **options)


def backward(p: Any) -> None:
    run, inputs = dispatch.named("triton").prepare(p)
    run.backward(inputs, torch.zeros_like(p.q), torch.zeros_like(p.q), torch.zeros(p.q.shape[:3]), None)


FIRST, LATER, WITHOUT = (False, True), (True, True), (False, False)
BACKWARD = ["statistics", "dkdv", "dq", "recompute_sums", "recompute_backward"]


def test_each_kernel_begins_in_the_tail_of_the_one_before(launched: list[Any]) -> None:
    backward(problem(300, 300))
    assert launched == [(name, *(FIRST if name == "statistics" else LATER)) for name in BACKWARD]


def test_the_kernel_that_recomputes_outputs_does_too(launched: list[Any]) -> None:
    run, inputs = dispatch.named("triton").prepare(problem(300, 300))
    run.forward(inputs)
    assert launched == [("forward", *FIRST), ("recompute_forward", *LATER)]


def test_dbias_kernel_is_launched_without_pdl(launched: list[Any]) -> None:
    bias = torch.zeros(2, 2, 300, 300, dtype=torch.bfloat16)
    backward(problem(300, 300, bias=bias))
    assert launched[-1] == ("dbias", *WITHOUT)


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 300), (300, 0)])
def test_without_all_kernels_there_is_no_pdl(launched: list[Any], n_q: int, n_k: int) -> None:
    """dq_kernel reads what statistics_kernel wrote without waiting for it, so dkdv_kernel must have waited."""
    backward(problem(n_q, n_k))
    assert launched
    assert [rest for _, *rest in launched] == [[*WITHOUT]] * len(launched)


def test_other_gpus_use_no_pdl(launched: list[Any], on_gpu: Callable[[Any], None]) -> None:
    on_gpu((8, 0))
    backward(problem(300, 300))
    assert [rest for _, *rest in launched] == [[*WITHOUT]] * len(BACKWARD)
