"""The clock of a GPU: the time between its events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashtile.lab.bench.gpu import device


def test_the_host_gets_ahead_before_the_device_is_timed() -> None:
    """The device is kept busy first, which is not counted."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2.5 if end is not self else 0.0

    def rest(cycles: int) -> None:
        assert cycles == device.HEAD_START
        log.append("rest")

    clock = device.Cuda.__new__(device.Cuda)
    clock.cuda = SimpleNamespace(Event=Event, _sleep=rest)
    assert clock.seconds(lambda: log.append("call")) == pytest.approx(2.5e-3)
    assert log == ["rest", "event", "call", "event", "wait"]
