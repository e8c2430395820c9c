"""Gradients on a GPU as slopes: 200 problems drawn at random for each backend, against differences of the oracle."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.gpu import test_hopper, test_random
from tests.gpu.test_random import Kind, try_some
from tests.support import finite_differences

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("backend")]

PROBLEMS = 200
KINDS = {"triton": test_random.KINDS, "gluon": test_hopper.KINDS}
SEED = 4  # used by no other test of these kinds


@pytest.mark.parametrize(
    ("backend", "kind"),
    [pytest.param(name, kind, id=f"{name}-{kind}") for name, kinds in KINDS.items() for kind in kinds],
    indirect=["backend"],
)
def test_gradients_are_slopes(backend: str, kind: Kind) -> None:
    try_some(kind, SEED, -(-PROBLEMS // len(KINDS[backend])), agree=finite_differences.agree)
