"""The way of a call: how many files it passes through, and that docs/architecture.md shows it as it is."""

from __future__ import annotations

import re
import shutil

import pytest

torch = pytest.importorskip("torch")

import flashtile as ft  # noqa: E402
from tests.backends.native.core import needs_native  # noqa: E402
from tests.tools import architecture  # noqa: E402
from tests.tools.tree import ROOT  # noqa: E402

MOST = {"NumPy": 5, "torch": 5, "torch, to be trained": 6, "its backward pass": 6}


@pytest.fixture(scope="module")
def ways() -> dict[str, architecture.Way]:
    return architecture.ways()


@needs_native
@pytest.mark.parametrize("call", MOST)
def test_files_of_a_warm_call(ways: dict[str, architecture.Way], call: str) -> None:
    assert len(ways[call]) <= MOST[call], ways[call]
    assert "backends/native/runner.py" in ways[call]
    assert not {"problem.py", "dispatch.py"} & set(ways[call]), "it is described once"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, for a driver that does nothing")
@pytest.mark.parametrize(("backend", "most"), [("gluon", 8), ("triton", 8)])
def test_files_of_a_call_on_a_gpu(backend: str, most: int) -> None:
    """On a driver that does nothing, forward and backward."""
    pytest.importorskip("triton", minversion="3.6")
    from tests.tools.idle_driver import SHAPE, idle

    plain = [torch.empty(SHAPE, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    leaves = [torch.empty_like(x, requires_grad=True) for x in plain]
    with idle(backend):
        out = ft.attention(*leaves, causal=True)
        dout = torch.empty_like(out)
        for run in (
            lambda: ft.attention(*plain, causal=True),
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        ):
            way = architecture.warm(run)
            assert len(way) <= most, way
            assert {f"backends/{backend}/forward.py", f"backends/{backend}/backward.py"} & set(way)
            assert not {"problem.py", "dispatch.py"} & set(way), "it is described once"


@needs_native
def test_a_first_call_is_described_and_chooses(ways: dict[str, architecture.Way]) -> None:
    assert {"problem.py", "dispatch.py", "checks/options.py"} <= set(ways["first call of its kind"])


@needs_native
def test_the_picture_is_that_of_the_code(ways: dict[str, architecture.Way]) -> None:
    assert architecture.PICTURE.read_text() == architecture.svg(ways), "run: python -m tests.tools.architecture"


def test_the_document_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.(?:py|h|cpp))`", text)
    assert len(named) > 9
    assert all((ROOT / "src" / "flashtile" / name).exists() for name in named), named
