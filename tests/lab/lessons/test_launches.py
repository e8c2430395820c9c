"""The lesson's counts are those of traffic.py, and no operation is missed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashtile import dispatch
from flashtile.band import full
from flashtile.cost import traffic
from flashtile.lab.lessons import launches as lesson
from flashtile.lab.lessons.text import Say
from flashtile.numerics import schedule
from flashtile.numerics.schedule import Grid


@pytest.fixture(scope="module")
def record() -> Any:
    return lesson.run(Say(lambda line: None), quick=True)


def test_six_trips_or_two(record: Any) -> None:
    assert record["standard"]["trips"] == 2 * len(schedule.STANDARD) == 6
    assert record["flash"]["trips"] == 2
    assert [len(record[way]["launches"]) for way in ("standard", "flash")] == [3, 1]


def test_the_bytes_are_those_of_traffic(record: Any) -> None:
    n, d = record["n"], lesson.DIM
    assert record["standard"]["bytes"] == 4 * traffic.standard_elements(n, d)
    grid = Grid(n, n, lesson.BLOCK, lesson.BLOCK)
    counted = traffic.count(schedule.fa2_forward(full(), grid), grid, traffic.Layout(d, d))
    assert record["flash"]["launches"][0]["read"] == counted.loaded_bytes
    assert record["flash"]["launches"][0]["written"] == counted.stored_bytes


def test_the_loop_makes_more_calls_and_moves_more(record: Any) -> None:
    calls = record["calls"]
    tiles = (record["n"] // lesson.BLOCK) ** 2
    assert calls["standard"]["calls"] == 8
    assert calls["tiled loop"]["calls"] > 10 * tiles
    assert calls["tiled loop"]["bytes"] > calls["standard"]["bytes"]
    if not dispatch.TABLE[0].missing():
        assert calls["flashtile"] == {"calls": 1, "bytes": 4 * 4 * record["n"] * lesson.DIM}


def test_without_the_core_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.Backend, "missing", lambda self: "the moon is wrong")
    lines: list[str] = []
    x = np.ones((4, 4), np.float32)
    calls, _ = lesson.on_cpu(Say(lines.append), x, x, x, 0.01)
    assert "not compared: the moon is wrong" in lines[0] and list(calls) == ["standard", "tiled loop"]


def test_numpy_is_timed_separately(together: list[set[str]]) -> None:
    x = np.ones((4, 4), np.float32)
    lesson.on_cpu(Say(lambda line: None), x, x, x, 0.01)
    assert together[0] <= {"flashtile"} and together[1:] == [{"standard"}, {"tiled loop"}]


def test_every_operation_is_counted() -> None:
    calls = lesson.Calls()
    x, y = lesson.counting(calls, np.ones((4, 2)), np.ones((2, 4)))
    z = x @ y  # 64 + 64 in, 128 out
    assert (calls.calls, calls.bytes) == (1, 256)
    z += 1.0  # 128 in, 128 out
    z.max(axis=1)  # 128 in, 32 out
    assert (calls.calls, calls.bytes) == (3, 256 + 256 + 160)


def test_with_torch() -> None:
    pytest.importorskip("torch")
    record = lesson.on_torch(Say(lambda line: None), "cpu", quick=True)
    calls = record["calls"]
    assert calls["standard"]["calls"] == 4 and calls["flashtile"]["calls"] == 1  # product, scale, softmax, product
    assert calls["tiled loop"]["calls"] > 100 and calls["tiled loop"]["bytes"] > calls["standard"]["bytes"]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    record = lesson.run(Say(lambda line: None), quick=True)
    assert record["gpu"]["device"] == "cuda" and record["gpu"]["calls"]["flashtile"]["calls"] == 1
