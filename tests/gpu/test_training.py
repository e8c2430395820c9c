"""A transformer learns with our attention as with torch's, on a GPU: with each backend, at sizes for both."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.gpu.runner import each_backend
from tests.support import training
from tests.support.training import GPU_SETUPS, Setup

pytestmark = [pytest.mark.gpu, *each_backend]
each_setup = pytest.mark.parametrize("setup", GPU_SETUPS, ids=lambda setup: f"D{setup.head_dim}")


@each_setup
def test_the_losses_are_those_of_torch(setup: Setup, backend: str) -> None:
    training.check(setup, training.losses(setup, training.flashtile_attention(backend)))


@each_setup
def test_a_scale_that_is_wrong_by_a_hundredth_is_seen(setup: Setup, backend: str) -> None:
    with pytest.raises(AssertionError, match="away from torch's runs"):
        training.check(setup, training.losses(setup, training.flashtile_attention(backend, scale_factor=1.01)))
