"""The types that mypy infers for calls in a user's file, and the errors that it reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile

pytest.importorskip("mypy")

USER = """
import numpy as np
import numpy.typing as npt
import flashtile as ft

class Tensor: ...  # stands for a library's

def use(x: npt.NDArray[np.float32], t: Tensor, flag: bool) -> None:
    reveal_type(ft.attention(x, x, x, causal=True))
    reveal_type(ft.attention(x, x, x, return_lse=True, window=(3, None)))
    reveal_type(ft.attention(t, t, t))
    reveal_type(ft.attention(t, t, t, return_lse=True, backend="auto", layout="bnhd"))
    reveal_type(ft.attention(t, t, t, return_lse=flag))
    ft.attention(x, x, x, casual=True)
    ft.attention(x, x, x, softcap="1")
    ft.attention_packed(t, t, t, t, t, layout="bnhd")
    ft.attention_packed(t, t, t, t, t, scale=0.5)
"""
TENSOR = "user.Tensor"


def test_arrays_give_arrays_and_wrong_keywords_are_errors(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    path = str(Path(flashtile.__file__).parents[1])
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    environment = os.environ if "site-packages" in path else os.environ | {"MYPYPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    said = [line for line in done.stdout.splitlines() if line.startswith("user.py")]
    revealed = [line.partition("Revealed type is ")[2].strip('"') for line in said if "Revealed" in line]
    array = re.compile(r"numpy\.ndarray\[.*float.*\]")
    assert len(revealed) == 5, done.stdout + done.stderr
    assert array.fullmatch(revealed[0])
    assert re.fullmatch(rf"tuple\[{array.pattern}, {array.pattern}\]", revealed[1], re.IGNORECASE)
    assert revealed[2:] == [TENSOR, f"tuple[{TENSOR}, {TENSOR}]", f"{TENSOR} | tuple[{TENSOR}, {TENSOR}]"]
    first = USER[: USER.index("    ft.attention(x, x, x, casual")].count("\n") + 1
    wrong = {int(line.split(":")[1]) for line in said if " error: " in line}
    assert wrong == {first, first + 1, first + 2}, said
