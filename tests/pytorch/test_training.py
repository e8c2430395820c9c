"""A transformer trains on a CPU with our attention as with torch's; the GPU setups are large enough."""

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
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def test_losses_match_those_of_torch() -> None:
    training.check(SETUP, training.losses(SETUP, training.flashtile_attention()))


def test_a_scale_wrong_by_one_percent_is_detected() -> None:
    with pytest.raises(AssertionError, match="away from torch's runs"):
        training.check(SETUP, training.losses(SETUP, training.flashtile_attention(scale_factor=1.01)))


@pytest.mark.parametrize("setup", training.GPU_SETUPS, ids=lambda setup: f"D{setup.head_dim}")
def test_gpu_setups_suit_the_hopper_kernels(setup: training.Setup) -> None:
    q = torch.empty(setup.batch, setup.heads, setup.length, setup.head_dim, dtype=torch.bfloat16)
    assert gluon.suits(describe(q, q, q, causal=True))
