"""Large results ask for large pages, which lie within them; small ones do not."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

from flashtile.pytorch import pages
from flashtile.pytorch.bridge import maker


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pages, "_advise", lambda: lambda *args: found.append(args))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_large_memory_asks(asked: list[tuple[Any, ...]]) -> None:
    maker((pages.LARGE // 4 - 1,), "float32")()
    assert not asked
    made = maker((pages.LARGE,), "float32")()
    ((begin, size, _),) = asked
    assert begin % mmap.PAGESIZE == 0 and 0 <= begin - made.data_ptr() < mmap.PAGESIZE
    assert begin + size == made.data_ptr() + made.nbytes


def test_where_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "toaster")
    assert pages._advise.__wrapped__() is None
    monkeypatch.setattr(pages, "_advise", lambda: None)
    assert maker((pages.LARGE,), "float32")().zero_().sum() == 0


def test_a_real_system_takes_it() -> None:
    x = maker((pages.LARGE,), "float32")()
    x.fill_(1)
    assert x.sum() == pages.LARGE
