"""Without a C++ core tensors go to torch's own attention where it is exact; where it is not, one warning says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from flashtile import dispatch
from flashtile.backends import tiles
from flashtile.backends.sdpa import passes
from flashtile.problem import describe
from tests.pytorch.samples import randn
from tests.support.grid import Call, truth_of
from tests.support.runners import torch_runner

WARNED = """
import sys, warnings
import numpy as np
import flashtile as ft
x = np.ones((1, 2, 8, 4), np.float32)
tensors = {tensors}
if tensors:
    import torch
    x = torch.from_numpy(x)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for options in {calls}:
        ft.attention(x, x, x, **options)
print(len(caught), *(str(w.message) for w in caught), sep="\\n")
print("torch" in sys.modules)
"""


def without_a_core(tmp_path: Path, code: str) -> list[str]:
    """What this prints in a process of its own that finds no compiled core."""
    alone = {**os.environ, "FLASHTILE_NATIVE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_tensors_take_torchs_own_attention_without_a_warning(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = [{}, {"causal": True}]
    assert without_a_core(tmp_path, WARNED.format(tensors=True, calls=calls)) == ["0", "True"]


def test_one_warning_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    count, said, _ = without_a_core(tmp_path, WARNED.format(tensors=True, calls=[{"softcap": 2.0}] * 2))
    assert count == "1" and "it takes no softcap" in said
    assert f"no compiled core for this machine in {tmp_path}" in said and "pip install --force-reinstall" in said


def test_arrays_get_the_warning_too_and_torch_is_not_imported(tmp_path: Path) -> None:
    count, said, torch_there = without_a_core(tmp_path, WARNED.format(tensors=False, calls=[{}, {}]))
    assert count == "1" and "sdpa: it takes torch tensors only" in said and torch_there == "False"


def test_plan_says_why(tmp_path: Path) -> None:
    code = """
import flashtile as ft, torch
arrays, tensors = (ft.plan((2, 8, 4), (2, 8, 4), kind) for kind in ("float32", torch.float32))
print(arrays.backend, arrays.reasons["sdpa"], tensors.backend, tensors.reasons["native"][:16], sep="\\n")
print(ft.plan((2, 8, 4), (2, 8, 4), torch.float32, window=(3, 0)).reasons["sdpa"])
"""
    expected = ["tiles", "it takes torch tensors only", "sdpa", "no compiled core", "it takes no window"]
    assert without_a_core(tmp_path, code) == expected


def test_arrays_are_refused_by_name() -> None:
    x = np.ones((1, 2, 8, 4), np.float32)
    with pytest.raises(ft.UnsupportedError, match="sdpa cannot run this: it takes torch tensors only; could: "):
        ft.attention(x, x, x, backend="sdpa")


def test_explicit_threads_are_kept_to() -> None:
    seen: list[int] = []
    q, usual = randn(1, 2, 8, 4), torch.get_num_threads()
    real = passes._forward
    passes._forward = lambda *args, **more: seen.append(torch.get_num_threads()) or real(*args, **more)
    try:
        ft.attention(q, q, q, backend="sdpa", threads=usual + 1)
    finally:
        passes._forward = real
    assert seen == [usual + 1] and torch.get_num_threads() == usual


def test_threads_of_the_environment_are_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    q, usual, real = randn(1, 2, 8, 4), torch.get_num_threads(), passes._forward
    monkeypatch.setattr(passes, "_forward", lambda *a, **more: seen.append(torch.get_num_threads()) or real(*a, **more))
    monkeypatch.setattr(passes.threads, "from_environment", lambda: usual + 2)
    ft.attention(q, q, q, backend="sdpa")
    ft.attention(q, q, q, backend="sdpa", threads=usual + 1)
    assert seen == [usual + 2, usual + 1] and torch.get_num_threads() == usual


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("rows", [(5, 9), (9, 5), (1, 9), (7, 7)], ids=str)
def test_nothing_is_left_to_numpy(rows: tuple[int, int], options: dict[str, Any], monkeypatch: Any) -> None:
    """Ordinary numbers, forward and backward."""
    monkeypatch.setattr(tiles, "forward", None)
    monkeypatch.setattr(tiles, "backward", None)
    q, k = randn(1, 4, rows[0], 8, requires_grad=True), randn(1, 2, rows[1], 8)
    ft.attention(q, k, k, backend="sdpa", **options).sum().backward()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", ["inf", "huge"])
def test_what_torch_would_get_wrong_is_made_by_numpy(what: str, causal: bool, monkeypatch: Any) -> None:
    """Numbers that are not finite, and gradients of rows whose lse has lost the logarithm of the sum."""
    made: list[str] = []
    for name in ("forward", "backward"):
        real = getattr(tiles, name)
        monkeypatch.setattr(tiles, name, lambda *a, _r=real, _n=name, **m: made.append(_n) or _r(*a, **m))
    q, k = randn(1, 2, 6, 4, requires_grad=True), randn(1, 2, 6, 4)
    if what == "inf":
        k[0, 0, -1, 0] = torch.inf
    else:
        k = k * 0 + 1e6
    ft.attention(q, k, k, backend="sdpa", causal=causal).sum().backward()
    assert made == (["forward", "backward"] if what == "inf" else ["backward"])


def test_a_row_that_sees_one_key_of_score_0_is_not_empty() -> None:
    """torch gives an lse of 0 both to it and to a row that sees nothing."""
    q, k = np.zeros((1, 1, 3, 4), np.float32), np.zeros((1, 1, 3, 4), np.float32)
    mask = np.array([[1, 0, 0], [0, 0, 0], [0, 1, 0]], bool)
    call = Call(q, k, k, {"mask": mask}, np.ones_like(q), np.ones((1, 1, 3), np.float32))
    _, lse = torch_runner("sdpa").forward(call)
    np.testing.assert_array_equal(lse, truth_of(call).lse)


def test_a_plan_has_the_tiles_of_torchs_source() -> None:
    row = next(row for row in dispatch.TABLE if row.name == "sdpa")
    for n_q, rows in ((1, 32), (192, 64), (800, 256)):
        problem = describe(*(np.zeros((1, 1, n, 8), np.float32) for n in (n_q, 9, 9)))
        assert row.load().tile(problem)[:2] == (rows, 512)
