"""Permanent memory: another thread allocates it, outside of any pool, and the caller's stream waits."""

from __future__ import annotations

from contextlib import nullcontext
from threading import get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gpu import permanent, tensors  # noqa: E402


class Device(NamedTuple):
    type: str
    index: int


GPU = Device("cuda", 1)


class Machine:
    """A GPU, whose default stream is current in a new thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.capturing, self.plain = False, torch.zeros
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "device", lambda device: self.say(f"device {device.index}"))
        event = SimpleNamespace(record=lambda: self.say("record"), query=lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        stream = SimpleNamespace(wait_event=lambda cleared: self.say("wait") if cleared is event else None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if device is GPU else None)
        monkeypatch.setattr(torch, "zeros", self.zeros)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
        monkeypatch.setattr(tensors, "_discard_buffers", {})

    def say(self, event: str) -> Any:
        self.events.append((event, get_ident()))
        return nullcontext()

    def zeros(self, shape: Any, dtype: Any, device: Any) -> Any:
        self.say("zeros")
        return self.plain(shape, dtype=dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def zeros(device: Any) -> Any:
    made, _ = permanent.zeros((3,), torch.int32, device)
    return made


def test_another_thread_allocates_and_this_stream_waits(gpu: Machine) -> None:
    made, cleared = permanent.zeros((3,), torch.int32, GPU)
    assert made.tolist() == [0, 0, 0] and cleared.query()
    assert [event for event, _ in gpu.events] == ["device 1", "zeros", "record", "wait"]
    *there, here = (thread for _, thread in gpu.events)
    assert len({*there}) == 1 and there[0] != get_ident() == here


def test_it_can_be_written_outside_of_inference_mode(gpu: Machine) -> None:
    for device in (GPU, torch.device("cpu")):
        with torch.inference_mode():
            made = zeros(device)
        made.add_(1)


def test_no_mode_of_the_caller_sees_it(gpu: Machine) -> None:
    """Such as the mode in which torch.compile's warm-up sets the device of new tensors."""
    with torch.device("meta"):
        assert zeros(GPU).device.type == "cpu"


def test_while_a_stream_is_captured_nothing_is_kept(gpu: Machine) -> None:
    gpu.capturing = True
    first, second = (tensors.discard_buffer(torch.float32, GPU) for _ in range(2))
    assert first.numel() == tensors.DISCARDED and first.data_ptr() != second.data_ptr()
    assert not tensors._discard_buffers
    gpu.capturing = False
    kept = tensors.discard_buffer(torch.float32, GPU)
    assert tensors.discard_buffer(torch.float32, GPU) is kept is tensors._discard_buffers[torch.float32, GPU]
