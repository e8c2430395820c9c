"""The host's cost of a small call, as a number of function calls, which is the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashtile as ft
from flashtile import dispatch

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from flashtile.backends.gpu import device as gpu  # noqa: E402
from flashtile.backends.gpu.kernel_launch import LaunchSequence  # noqa: E402
from flashtile.pytorch import calls, interception  # noqa: E402

# Python and C function calls. Each takes a twentieth of a microsecond or more.
MOST = {"triton": (22, 29), "gluon": (24, 30)}

MOST_WITH_GRADIENTS = {"forward": (26, 30), "backward": (25, 64)}


@pytest.fixture(params=MOST)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Send tensors without memory to this backend, like those of a Hopper GPU; launches do nothing."""
    if request.param == "gluon":
        from flashtile.backends.gluon import backward, forward
        from flashtile.backends.gluon.work_counters import WorkCounters

        shared = WorkCounters(None, torch.empty(0, device="meta"), [])
        for module in (forward, backward):
            monkeypatch.setattr(module, "acquire_counters", lambda device: shared)
    row = next(row for row in dispatch.TABLE if row.name == request.param)
    monkeypatch.setattr(dispatch, "choose", lambda *_: row)
    monkeypatch.setattr(gpu, "architecture", lambda device: (9, 0))
    monkeypatch.setattr(gpu, "processors", lambda device: 132)
    monkeypatch.setattr(LaunchSequence, "__call__", lambda self, *values: None)
    monkeypatch.setattr(interception, "_PLAIN", -1)
    monkeypatch.setattr(calls, "_known", {})
    return str(request.param)


def calls_of(run: Callable[[], Any], files: str = "") -> Counter[str]:
    """Count the Python ("call") and C ("c_call") functions that run() calls, itself included, in these files."""
    found: Counter[str] = Counter()
    gc.collect()  # not while counting: it runs callbacks
    sys.setprofile(lambda frame, event, arg: found.update([event] if files in frame.f_code.co_filename else []))
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_function_calls_of_a_small_call(backend: str) -> None:
    q, k, v = (torch.empty(8, 8, 128, 64, device="meta", dtype=torch.bfloat16) for _ in range(3))
    for more in ({}, {"causal": True}, {"return_lse": True}):
        ft.attention(q, k, v, **more)  # prepares
        assert sum(map(len, calls._known.values())) <= 2
        found = calls_of(lambda more=more: ft.attention(q, k, v, **more))  # type: ignore[misc]
        python, c = MOST[backend]
        assert found["call"] <= python and found["c_call"] <= c, (more, found)


def test_function_calls_with_gradients(backend: str) -> None:
    leaves = [torch.empty(8, 8, 128, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out = ft.attention(*leaves, causal=True)
    dout = torch.empty_like(out)

    def back() -> None:
        torch.autograd.grad(out, leaves, dout, retain_graph=True)

    back()
    for name, run in (("forward", lambda: ft.attention(*leaves, causal=True)), ("backward", back)):
        found = calls_of(run, str(Path(ft.__file__).parent))
        python, c = MOST_WITH_GRADIENTS[name]
        assert found["call"] <= python and found["c_call"] <= c, (name, found)


def test_calls_are_counted() -> None:
    def twice() -> None:
        len("")
        len("")

    found = calls_of(twice)
    assert found["call"] == 1 and found["c_call"] >= 2
