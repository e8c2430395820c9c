"""tests/tools/compare.py: a renamed version works and shares nothing with the installed one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import flashtile
from flashtile.lab.bench.gpu import peers
from tests.tools import compare
from tests.tools.tree import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_renamed_folder(folder: Path) -> None:
    compare.copy_renamed(str(ROOT / "src"), "flashtile_other", folder)
    other = import_module("flashtile_other")
    q = np.ones((2, 3, 4), np.float32)
    assert other.attention is not flashtile.attention
    np.testing.assert_array_equal(other.attention(q, q, q, backend="tiles"), q)
    found = compare.peer_of("flashtile_other")
    assert found.name == "flashtile_other" and peers.PEERS[0].name == "flashtile"


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a checkout")
def test_files_of_a_commit() -> None:
    assert set(compare.files_of("HEAD")) >= {"__init__.py", "api.py", "backends/gluon/forward_kernel.py"}


def test_cases_on_a_cpu() -> None:
    small = next(group for group in compare.CPU if group.name == "small")
    unknown = replace(small, cases=(replace(small.cases[0], n_q=129),))
    assert compare.contender("flashtile", unknown, unknown.cases[0], 1) is None
    for group in (small, compare.SMALL_STEP):
        call = compare.contender("flashtile", group, group.cases[0], 1)
        assert call is not None and call() is not None
