"""The scripts of examples/ train as in one process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.processes import Ranks  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux", reason="this torch has no gloo"
)
SCRIPT = Path(__file__).parents[2] / "examples" / "train_context_parallel.py"


def compare(rank: int, _size: int, shape: tuple[int, int], steps: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    train = runpy.run_path(str(SCRIPT))["train"]
    found = train(init_device_mesh("cpu", shape, mesh_dim_names=("data", "context")), steps)
    if rank == 0:
        assert found == pytest.approx(train(None, steps), rel=1e-12)
        assert found[-1] < found[0]


def test_losses_are_those_of_one_process(two: Ranks) -> None:
    two.run(compare, (1, 2), 2)


@pytest.mark.slow
def test_losses_of_four_are_those_of_one_process() -> None:
    with Ranks(4) as four:
        four.run(compare, (2, 2), 5)
