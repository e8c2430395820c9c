"""The memory of row statistics in a backward pass."""

from __future__ import annotations

from typing import Any

import pytest

from flashtile.checks.shapes import check_gradients
from flashtile.problem import describe

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gpu import device as gpu  # noqa: E402
from flashtile.backends.triton.backward import Backward  # noqa: E402


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "architecture", lambda _device: (9, 0))
    monkeypatch.setattr(gpu, "processors", lambda _device: 132)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000, 1024])
def test_statistics_have_space_for_a_whole_tile(rows: int, packed: bool) -> None:
    """dkdv_kernel reads a tile of them from the first of the last rows on, wherever a packed sequence begins."""
    shape = (rows, 2, 64) if packed else (1, 2, rows, 64)
    q = torch.empty(shape, dtype=torch.bfloat16)
    cu = {"cu_q": torch.tensor([0, rows]), "cu_k": torch.tensor([0, rows])} if packed else {}
    p = describe(q, q, q, **cu)
    given = check_gradients(p, q, q, torch.empty(shape[:-1]), None)
    run = Backward(p, q.device, dict.fromkeys(("q", "k", "v", "dout"), True), given, False)
    tile, statistics = launch_of(run, "dkdv_kernel").constants["C"].BLOCK_Q, launch_of(run, "statistics_kernel")
    padded = statistics.rows[statistics.parameters.index("delta")][1]
    last = rows - 1 if packed else (rows - 1) // tile * tile
    assert last + tile <= padded and padded % 16 == 0
    assert run._statistics[1].of(run._scratch()).shape == (1, 2, padded)


def launch_of(run: Any, kernel: str) -> Any:
    return next(launch for launch, _ in run._launch.launches if launch.kernel.fn.__name__ == kernel)
