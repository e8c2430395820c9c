"""A transformer learns with our attention as with torch's, on a CPU; and the setups for a GPU are large enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from flashtile.backends import gluon  # noqa: E402
from flashtile.problem import describe  # noqa: E402
from tests.lab.bench.gpu.fakes import one_thread  # noqa: E402
from tests.support import training  # noqa: E402

SETUP = training.Setup("cpu", head_dim=32, heads=2, batch=8, length=64, steps=200)


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


def test_the_losses_are_those_of_torch() -> None:
    training.check(SETUP, training.losses(SETUP, training.flashtile_attention()))


def test_a_scale_that_is_wrong_by_a_hundredth_is_seen() -> None:
    with pytest.raises(AssertionError, match="away from torch's runs"):
        training.check(SETUP, training.losses(SETUP, training.flashtile_attention(scale_factor=1.01)))


@pytest.mark.parametrize("setup", training.GPU_SETUPS, ids=lambda setup: f"D{setup.head_dim}")
def test_on_a_gpu_there_is_enough_to_do_for_the_hopper_kernels(setup: training.Setup) -> None:
    q = torch.empty(setup.batch, setup.heads, setup.length, setup.head_dim, dtype=torch.bfloat16)
    assert gluon.suits(describe(q, q, q, causal=True))
