"""Fixtures of both GPU backends: a pretended GPU that passes are launched for, without running anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Pretend to have a GPU of this architecture, and no interpreter."""
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
    """The launches on Hopper: the kernel, whether it is launched with PDL, and whether it is compiled for it."""
    from flashtile.backends.gpu.kernel_launch import KernelLaunch

    found: list[tuple[str, bool, bool]] = []

    def listen(launch: KernelLaunch, *args: Any) -> None:
        name = launch.kernel.fn.__name__.removesuffix("_kernel")
        found.append((name, launch.options.get("launch_pdl", False), launch.constants.get("PDL", False)))

    monkeypatch.setattr(KernelLaunch, "__call__", listen)
    on_gpu((9, 0))
    return found
