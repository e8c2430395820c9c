"""What tests of both GPU backends share: a GPU that a pass is launched for, while nothing is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have a GPU of this architecture, and no interpreter."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from flashtile.backends.gpu import device as gpu
    from flashtile.backends.gpu import pdl

    def have(architecture: Any) -> None:
        monkeypatch.setattr(gpu, "architecture", lambda _device: architecture)
        monkeypatch.setattr(pdl, "INTERPRETED", False)

    return have


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, on_gpu: Callable[[Any], None]) -> list[tuple[str, bool, bool]]:
    """On Hopper, of each launch: the kernel, whether it is launched to follow, and whether compiled for a chain."""
    from flashtile.backends.gpu.kernel_launch import KernelLaunch

    found: list[tuple[str, bool, bool]] = []

    def listen(start: KernelLaunch, *args: Any) -> None:
        name = start.kernel.fn.__name__.removesuffix("_kernel")
        found.append((name, start.options.get("launch_pdl", False), start.constants.get("PDL", False)))

    monkeypatch.setattr(KernelLaunch, "__call__", listen)
    on_gpu((9, 0))
    return found
