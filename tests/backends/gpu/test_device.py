"""Whether float32 products may be rounded to TF32, through each of torch's settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from flashtile.backends.gpu.device import tf32  # noqa: E402

NEWER = hasattr(torch._C, "_get_fp32_precision_getter")
SETTINGS = {
    "": False,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.set_float32_matmul_precision('medium')": True,
    "torch.set_float32_matmul_precision('high'); torch.set_float32_matmul_precision('highest')": False,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
}
NEW_SETTINGS = {
    "torch.backends.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'ieee'": False,
    "torch.backends.fp32_precision = 'bf16'": False,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
    "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": False,
}
CHILD = """
import torch, flashtile as ft
from flashtile.backends.gpu.device import tf32
q = torch.ones(1, 1, 2, 4)
for setting in {settings}:
    torch.set_float32_matmul_precision("highest")
    for name in ("generic all", "cuda all", "cuda matmul", "mkldnn matmul"):
        if {newer}:
            torch._C._set_fp32_precision_setter(*name.split(), "none")
    exec(setting)
    for _ in range(2):
        assert ft.attention(q, q, q).eq(1).all()
    print(tf32())
"""


def test_every_setting() -> None:
    """In a separate process, because no setting can be fully undone."""
    said = SETTINGS | (NEW_SETTINGS if NEWER else {})
    code = CHILD.format(settings=list(said), newer=NEWER)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert dict(zip(said, done.stdout.split(), strict=True)) == {name: str(value) for name, value in said.items()}


def test_releases_with_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtile.backends.gpu.device._by_backend", None)
    for word, wanted in (("highest", False), ("high", True), ("medium", True)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda word=word: word)
        assert tf32() is wanted
