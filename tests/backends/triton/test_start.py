"""Start past its first call, with a launcher that only listens in place of the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.triton import start as starting  # noqa: E402
from flashtile.backends.triton.arguments import Rows  # noqa: E402
from flashtile.backends.triton.start import Start  # noqa: E402
from flashtile.backends.triton.tensors import maker  # noqa: E402

BEFORE = 13  # what a launcher is given before the arguments of the kernel: grid, stream, function, hooks


class CudaLauncher:
    """By this name Start knows that the driver can be called at once."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, described: bool) -> None:
        self.heard: list[tuple[Any, ...]] = []

        def launcher(*args: Any) -> None:
            self.heard.append(args)

        self.launch = (lambda *args: launcher(*args)) if described else launcher


class Kernel:
    """Compiled at once; knows with what it was started by Triton's own way."""

    def __init__(self, descriptors: int = 0) -> None:
        self.given: list[tuple[Any, ...]] = []
        self.compiled = SimpleNamespace(
            run=CudaLauncher(described=descriptors > 0),
            packed_metadata=(4, 1, 0),
            function=77,
            metadata=SimpleNamespace(tensordesc_meta=[{}] * descriptors),
        )

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.given.append(args)
            return self.compiled

        return run


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No interpreter and no GPU; the stream that is current can be set."""
    current = SimpleNamespace(stream=5)
    monkeypatch.setattr(starting, "INTERPRETED", False)
    active = SimpleNamespace(get_current_device=lambda: 1, get_current_stream=lambda device: (device, current.stream))
    monkeypatch.setattr(starting, "driver", SimpleNamespace(active=active))
    return current


def test_tensors_get_their_strides_and_go_as_addresses() -> None:
    kernel = Kernel()
    start = Start(kernel, 9, rows={0: (1, 2, 3)}, blocks={2: None}, C="constant")
    first, second, marks = (torch.zeros(4) for _ in range(3))
    start(first, marks, first, None, 8)
    assert kernel.given == [(Rows(first, 1, 2, 3), marks, None, None, 8)]
    start(second, marks, second, None, 8)
    (heard,) = kernel.compiled.run.heard
    assert heard[:5] == (9, 1, 1, (1, 5), 77)
    assert heard[BEFORE:] == ((second.data_ptr(), 1, 2, 3), marks.data_ptr(), None, None, 8, "constant")


def test_a_kernel_that_follows_is_launched_so() -> None:
    for follows in (False, True):
        kernel = Kernel()
        kernel.compiled.run.launch_pdl = follows
        start = Start(kernel, 1)
        start(1)
        start(2)
        (heard,) = kernel.compiled.run.heard
        assert heard[6] is follows


def test_each_launch_goes_to_the_stream_of_its_time(streams: Any) -> None:
    kernel = Kernel()
    start = Start(kernel, 1)
    for stream in (5, 6, 7):
        streams.stream = stream
        start(1)
    assert [heard[3] for heard in kernel.compiled.run.heard] == [(1, 6), (1, 7)]


def test_a_descriptor_is_encoded_once_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    encoded: list[Any] = []

    def encode(descriptor: Any, metadata: Any) -> list[Any]:
        encoded.append(descriptor)
        return ["map", descriptor.base.data_ptr(), *descriptor.shape]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    monkeypatch.setattr(starting, "MOST_ENCODED", 4)
    kernel = Kernel(descriptors=2)
    like = maker(SimpleNamespace(base=None, shape=[6]))
    start = Start(kernel, 1, rows={1: (1, 2, 3)}, blocks={2: like, 0: like})
    x, y = torch.zeros(6), torch.zeros(6)
    for _ in range(3):
        start(x, y, y, 5)
    at, other = x.data_ptr(), y.data_ptr()
    assert kernel.compiled.run.heard[-1][BEFORE:] == ("map", at, 6, (other, 1, 2, 3), "map", other, 6, 5)
    assert len(encoded) == 2
    many = [torch.zeros(6) for _ in range(6)]
    for z in many:
        start(z, y, y, 5)
        assert kernel.compiled.run.heard[-1][BEFORE + 1] == z.data_ptr()
    assert len(encoded) > 2 + len(many)  # some of y's too, forgotten on the way


def test_a_profiler_hears_of_launches() -> None:
    import triton

    kernel = Kernel()
    start = Start(kernel, 1)
    start(1)
    hook = triton.knobs.runtime.launch_enter_hook
    listener: Any = lambda metadata: None  # noqa: E731
    hook.add(listener)
    try:
        start(2)
    finally:
        hook.remove(listener)
    start(3)
    assert kernel.given == [(1,), (2,)]
    assert [heard[BEFORE:] for heard in kernel.compiled.run.heard] == [(3,)]
