"""What is kept for good is made by another thread, whose memory comes from no pool, and is complete when it comes."""

from __future__ import annotations

from contextlib import nullcontext
from threading import get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.triton import permanent, tensors  # noqa: E402


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
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: self.say("wait")))
        monkeypatch.setattr(torch, "zeros", self.zeros)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
        monkeypatch.setattr(tensors, "_dumps", {})

    def say(self, event: str) -> Any:
        self.events.append((event, get_ident()))
        return nullcontext()

    def zeros(self, shape: Any, dtype: Any, device: Any) -> Any:
        self.say("zeros")
        return self.plain(shape, dtype=dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_another_thread_makes_it_and_waits(gpu: Machine) -> None:
    made = permanent.zeros((3,), torch.int32, GPU)
    assert made.tolist() == [0, 0, 0]
    assert [event for event, _ in gpu.events] == ["device 1", "zeros", "wait"]
    assert len({thread for _, thread in gpu.events}) == 1 and gpu.events[0][1] != get_ident()


def test_it_is_good_for_all_though_made_in_inference_mode(gpu: Machine) -> None:
    for device in (GPU, torch.device("cpu")):
        with torch.inference_mode():
            made = permanent.zeros((3,), torch.int32, device)
        made.add_(1)


def test_no_mode_of_the_caller_sees_it(gpu: Machine) -> None:
    """As torch.compile's warm-up, which has the device of new tensors in one."""
    with torch.device("meta"):
        assert permanent.zeros((3,), torch.int32, GPU).device.type == "cpu"


def test_while_a_stream_is_captured_nothing_is_kept(gpu: Machine) -> None:
    gpu.capturing = True
    assert permanent.zeros((3,), torch.int32, GPU) is None
    first, second = (tensors.dump(torch.float32, GPU) for _ in range(2))
    assert first.numel() == tensors.DUMPED and first.data_ptr() != second.data_ptr()
    assert not tensors._dumps
    gpu.capturing = False
    kept = tensors.dump(torch.float32, GPU)
    assert tensors.dump(torch.float32, GPU) is kept is tensors._dumps[torch.float32, GPU]
