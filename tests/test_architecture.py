"""How many files a call passes through, and whether docs/architecture.md shows them correctly."""

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
def test_files_of_a_cached_call(ways: dict[str, architecture.Way], call: str) -> None:
    assert len(ways[call]) <= MOST[call], ways[call]
    assert "backends/native/runner.py" in ways[call]
    assert not {"problem.py", "dispatch.py"} & set(ways[call]), "a call is described once"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the stub driver")
@pytest.mark.parametrize(("backend", "most"), [("gluon", 8), ("triton", 8)])
def test_files_of_a_gpu_call(backend: str, most: int) -> None:
    """Forward and backward, with a stub driver."""
    pytest.importorskip("triton", minversion="3.6")
    from tests.tools.host_time import SHAPE, stub_driver

    plain = [torch.empty(SHAPE, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    leaves = [torch.empty_like(x, requires_grad=True) for x in plain]
    with stub_driver(backend):
        out = ft.attention(*leaves, causal=True)
        dout = torch.empty_like(out)
        for run in (
            lambda: ft.attention(*plain, causal=True),
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        ):
            way = architecture.way_of_cached(run)
            assert len(way) <= most, way
            assert {f"backends/{backend}/forward.py", f"backends/{backend}/backward.py"} & set(way)
            assert not {"problem.py", "dispatch.py"} & set(way), "a call is described once"


@needs_native
def test_a_first_call_is_checked_and_dispatched(ways: dict[str, architecture.Way]) -> None:
    assert {"problem.py", "dispatch.py", "checks/options.py"} <= set(ways["first call of its kind"])


@needs_native
def test_the_picture_matches_the_code(ways: dict[str, architecture.Way]) -> None:
    assert architecture.PICTURE.read_text() == architecture.svg(ways), "run: python -m tests.tools.architecture"


def test_the_document_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.(?:py|h|cpp))`", text)
    assert len(named) > 9
    assert all((ROOT / "src" / "flashtile" / name).exists() for name in named), named
