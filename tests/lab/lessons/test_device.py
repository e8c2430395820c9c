"""Where kernels run, and the reasons why they cannot."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from flashtile.lab.lessons import device, oracle
from flashtile.lab.lessons.lesson import Unavailable


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with torch and triton but no GPU, without TRITON_INTERPRET, before triton is imported."""
    monkeypatch.setattr(device.machine, "has", lambda package: True)
    monkeypatch.setattr(device.machine, "gpu", lambda: None)
    monkeypatch.setattr(device, "TOO_NEW", (99, 0))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "triton", raising=False)


def test_without_a_gpu_triton_interprets() -> None:
    assert device.for_triton() == "cpu" and os.environ["TRITON_INTERPRET"] == "1"


def test_with_a_gpu_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.machine, "gpu", lambda: "a fast one")
    assert device.for_triton() == "cuda" and "TRITON_INTERPRET" not in os.environ
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device.for_triton() == "cpu"


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", object())  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="without its interpreter"):
        device.for_triton()
    monkeypatch.setattr(device, "TOO_NEW", (1, 0))
    with pytest.raises(Unavailable, match=f"needs numpy < 1.0, not {np.__version__}"):
        device.for_triton()
    monkeypatch.setattr(device.machine, "has", lambda package: package == "torch")
    with pytest.raises(Unavailable, match=r"triton is not installed; run: pip install 'flashtile\[gpu\]'"):
        device.for_triton()


@pytest.mark.parametrize("off, holds", [(0.0, True), (1e-2, False)])
def test_the_oracle_check_can_fail(off: float, holds: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 20, 8)).astype(np.float32) for _ in range(3))
    from flashtile import standard_attention

    out = standard_attention(q, k, v, causal=True)
    out[0, 3, 2] += off
    verdict = oracle.check(out, q, k, v, causal=True)
    assert verdict["holds"] is holds and verdict["error"] == pytest.approx(off, abs=1e-12)
