"""machine.py: the oldest supported releases, errors for older ones, and the name of the processor."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashtile.host import machine
from tests.tools.tree import ROOT

FAKED = "import torch; torch.__version__ = {version!r}; import flashtile; x = torch.zeros(4, 4)\n"


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("2.6.0", True),
        ("2.7.1+cu126", True),
        ("2.8.0", False),
        ("2.8.0a0+git1", False),
        ("2.15.0", False),
        ("3", False),
    ],
)
def test_releases_are_compared_by_number(version: str, old: bool) -> None:
    message = machine.too_old("torch", version)
    assert message == (
        f"torch: expected 2.8 or newer, got {version}; run: pip install --upgrade torch" if old else None
    )


def test_a_missing_package_is_not_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: None)
    assert all(machine.too_old(name) is None for name in machine.OLDEST)


def test_the_package_requires_supported_releases() -> None:
    extras = (ROOT / "pyproject.toml").read_text()
    (least,) = re.findall(r'^torch = \["torch>=([\d.]+)"\]', extras, re.MULTILINE)
    (triton,) = re.findall(r'"triton>=([\d.]+);', extras)
    assert {"torch": least, "triton": triton} == {name: machine.OLDEST[name] for name in ("torch", "triton")}


def test_every_call_with_an_old_torch_raises_an_error() -> None:
    pytest.importorskip("torch")
    code = FAKED.format(version="2.6.0+cu124") + (
        "for _ in range(2):\n"
        "    try: flashtile.attention(x, x, x)\n"
        "    except flashtile.UnsupportedError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [machine.too_old("torch", "2.6.0+cu124")] * 2, done.stderr


@pytest.mark.parametrize("package", machine.OLDEST)
def test_doctor_reports_old_releases(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flashtile.lab.cli.app import app

    monkeypatch.setattr(machine, "_version", lambda name: "0.1.0" if name == package else None)
    message = machine.too_old(package)
    assert message is not None and f"got 0.1.0; run: pip install --upgrade {package}" in message
    assert message in CliRunner().invoke(app, ["doctor"]).output.replace("\n", " ")


CPU = """processor : 0
vendor_id : AuthenticAMD
cpu family : 25
model : 17
model name : AMD EPYC
stepping : 1

processor : 1
model name : another
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (CPU, "AMD EPYC (family 25, model 17, stepping 1)"),
        (CPU.replace("stepping", "microcode"), "AMD EPYC (family 25, model 17)"),
        ("model name : Cortex\n", "Cortex"),
    ],
)
def test_a_processor_is_identified_by_its_numbers_too(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processors have the same name."""
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    machine.CPUINFO.write_text(text)
    assert machine.describe()["processor"] == name
