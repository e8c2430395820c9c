"""Large pages are requested for large results, within their memory, and not for small ones."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

from flashtile.pytorch import pages
from flashtile.pytorch.bridge import maker


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pages, "_advise", lambda: lambda *args: found.append(args))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_only_large_results_request_large_pages(requests: list[tuple[Any, ...]]) -> None:
    maker((pages.LARGE // 4 - 1,), "float32")()
    assert not requests
    made = maker((pages.LARGE,), "float32")()
    ((begin, size, _),) = requests
    assert begin % mmap.PAGESIZE == 0 and 0 <= begin - made.data_ptr() < mmap.PAGESIZE
    assert begin + size == made.data_ptr() + made.nbytes


def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "toaster")
    assert pages._advise.__wrapped__() is None
    monkeypatch.setattr(pages, "_advise", lambda: None)
    assert maker((pages.LARGE,), "float32")().zero_().sum() == 0


def test_large_results_on_this_system() -> None:
    x = maker((pages.LARGE,), "float32")()
    x.fill_(1)
    assert x.sum() == pages.LARGE
