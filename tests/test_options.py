"""The one list of options: what is made from it, and that a new option needs only a row there and its arithmetic."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile as ft
from flashtile import options
from flashtile.backends.native import library as library_of_core
from flashtile.inputs import TENSORS
from flashtile.options import ARRAYS, DEFAULTS, OPTIONS
from flashtile.problem import Problem
from tests.tools.tree import SOURCE


def test_everything_made_from_the_list_has_all_options() -> None:
    parameters = inspect.signature(ft.attention).parameters
    assert list(parameters) == ["q", "k", "v", "return_lse", "backend", *DEFAULTS]
    assert all(parameters[name].default == default for name, default in DEFAULTS.items())
    lines = (inspect.getdoc(ft.attention) or "").splitlines()
    assert set(DEFAULTS) < {line.split()[0] for line in lines if line and line[0] != " "}
    assert set(OPTIONS) - {"causal", "window"} < set(Problem.__dataclass_fields__)
    assert ("q", "k", "v", *ARRAYS) == TENSORS
    assert all(name in options.PackedOptions.__annotations__ for name in OPTIONS)


# A constant that is added to all scores: the lse grows by it, and nothing else changes.
LACKING = ("native", "sdpa", "gluon", "triton")
ROW = f'    shift: Annotated[float, Option(0.0, "float", checks.real_or_none, unsupported_by={LACKING})]\n'
ARITHMETIC = "        S = S + dtype.type(p.shift)\n"
USE = """
import inspect, warnings
import numpy as np
import flashtile as ft
warnings.simplefilter("ignore")
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 9, 8)).astype(np.float32)
for shift in (2.0, -1.5, 2.0):
    for name in ("tiles", "reference", "auto"):
        out, lse = ft.attention(q, k, v, causal=True, shift=shift, return_lse=True, backend=name)
        plain = ft.attention(q, k, v, causal=True, return_lse=True, backend=name)
        np.testing.assert_allclose(out, plain[0], atol=1e-6)
        np.testing.assert_allclose(lse, plain[1] + shift, atol=1e-5)
        grads = ft.attention_backward(out, q, k, v, out, lse, causal=True, shift=shift, backend=name)
        exact = ft.attention_backward(out, q, k, v, *plain, causal=True, backend=name)
        np.testing.assert_allclose(grads.dq, exact.dq, atol=1e-5)
def error(**options):
    try:
        ft.attention(q, k, v, **options)
    except ft.FlashtileError as found:
        return str(found)
if ft.plan((8, 8), (8, 8)).backend == "native":
    assert "native cannot run this: it takes no shift" in error(shift=1.0, backend="native")
    assert ft.plan((8, 8), (8, 8), shift=1.0).reasons["native"] == "it takes no shift"
assert ft.plan((8, 8), (8, 8), shift=1.0).backend == "tiles"
assert "shift: expected a number, got str" == error(shift="x")
assert "shfit: expected shift" in error(shfit=1.0)
assert inspect.signature(ft.attention).parameters["shift"].default == 0.0
rows = q[0].swapaxes(0, 1)
packed = ft.attention_packed(rows, rows, rows, [0, 4, 9], [0, 4, 9], shift=1.0)
assert packed.shape == (9, 2, 8)
"""
USE_OF_TENSORS = """
import torch
given = [torch.from_numpy(x.copy()).requires_grad_() for x in (q, k, v)]
out, lse = ft.attention(*given, shift=2.0, return_lse=True)
plain = ft.attention(*given, return_lse=True)
torch.testing.assert_close(lse, plain[1] + 2)
torch.testing.assert_close(torch.autograd.grad(lse.sum(), given[0]), torch.autograd.grad(plain[1].sum(), given[0]))
compiled = torch.compile(lambda *x: ft.attention(*x, shift=2.0, return_lse=True), backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(*given)[1], lse)
mapped = torch.vmap(lambda x: ft.attention(x, given[1].detach(), given[2].detach(), shift=2.0, return_lse=True)[1])
torch.testing.assert_close(mapped(given[0].detach()[None])[0], lse.detach())
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one more option."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(SOURCE, folder / "flashtile", ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, more in (
        ("options.py", "    deterministic: Annotated[bool", ROW),
        ("numerics/head.py", "        i, j = self._positions(rows, cols)\n        if p.alibi", ARITHMETIC),
    ):
        text = (folder / "flashtile" / file).read_text()
        assert text.count(before) == 1
        (folder / "flashtile" / file).write_text(text.replace(before, more + before))
    return folder


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_new_option_needs_a_row_and_its_arithmetic(changed: Path, library: str) -> None:
    code = USE
    if library == "torch":
        pytest.importorskip("torch")
        code += USE_OF_TENSORS
    environment = os.environ | {"PYTHONPATH": str(changed), "FLASHTILE_NATIVE_DIR": str(library_of_core.directory())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
