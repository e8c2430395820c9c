"""Work counters: which calls share them, which have their own, and where their memory comes from."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from threading import get_ident
from time import sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from flashtile.backends.gluon import work_counters as module  # noqa: E402
from flashtile.backends.gluon.work_counters import WorkCounters, acquire_counters  # noqa: E402

GPU = SimpleNamespace(type="cuda", index=0)
SMALL = 4  # pairs in a bank
plain_zeros = torch.zeros


class Machine:
    """A GPU and torch's allocator as acquire_counters() sees them: captured streams, and threads with a pool."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.cleared = 1, False, 0
        self.pooled: set[int] = set()  # threads, through torch.cuda.use_mem_pool() or a warm-up of torch.compile
        self.of_pools: list[Any] = []
        self.caller = get_ident()
        self.waited, self.is_clearing = 0, False

    def zeros(self, shape: Any, dtype: Any, device: Any) -> Any:
        self.cleared += 1
        made = plain_zeros(shape, dtype=dtype)
        if get_ident() in self.pooled or self.is_capturing():
            self.of_pools.append(made)
        return made

    def is_capturing(self) -> bool:
        """Another thread begins on the default stream."""
        return self.capturing and get_ident() == self.caller

    def event(self) -> Any:
        """An event that another thread records."""
        assert get_ident() != self.caller
        return SimpleNamespace(record=lambda: None, query=self.is_over)

    def is_over(self) -> bool:
        assert not self.capturing, "it may not be asked"
        return not self.is_clearing

    def current_stream(self, device: Any) -> Any:
        def wait_event(_: Any) -> None:
            assert device is GPU and not self.capturing and get_ident() == self.caller
            self.waited += 1

        return SimpleNamespace(wait_event=wait_event)

    def is_of_a_pool(self, x: Any) -> bool:
        return any(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in self.of_pools)


@pytest.fixture
def gpu() -> Iterator[Machine]:
    machine = Machine()
    with (
        mock.patch.multiple(module, _free={}, _banks={}, _taken={}, _clearing={}, BANK=SMALL),
        mock.patch.object(torch, "zeros", machine.zeros),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing),
        mock.patch.object(torch.cuda, "Event", machine.event),
        mock.patch.object(torch.cuda, "current_stream", machine.current_stream),
        mock.patch.object(torch.cuda, "device", lambda device: nullcontext()),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: machine.stream, create=True),
    ):
        yield machine


def fill_bank() -> None:
    """As a warm-up does: the second call finds that the first call's bank is cleared."""
    for _ in range(2):
        acquire_counters(GPU).release()


def apart(found: list[WorkCounters]) -> bool:
    """Whether they share no memory."""
    parts = [x for each in found for x in each[:2] if x is not None]
    places = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in parts)
    return all(end <= begin for (_, end), (begin, _) in pairwise(places))


def test_launches_of_a_stream_reuse_them(gpu: Machine) -> None:
    first = acquire_counters(GPU)
    assert first.counters.tolist() == [0, 0] and first.flags.numel() == module.MAX_FLAGS
    assert first.counters.data_ptr() % 16 == first.flags.data_ptr() % 16
    first.release()
    cleared = gpu.cleared
    assert acquire_counters(GPU) is first
    assert gpu.cleared == cleared
    first.release()
    gpu.stream = 2
    assert apart([acquire_counters(GPU), first])


def test_counters_in_use_are_not_shared(gpu: Machine) -> None:
    """Threads may launch on one stream at once, and a launch may fail."""
    first, second = acquire_counters(GPU), acquire_counters(GPU)
    assert apart([first, second])
    second.release()
    assert acquire_counters(GPU) is second
    assert apart([first, second, acquire_counters(GPU)])


def test_graphs_have_their_own_and_clear_nothing(gpu: Machine) -> None:
    fill_bank()
    shared = acquire_counters(GPU)
    gpu.capturing, cleared = True, gpu.cleared
    own = [acquire_counters(GPU) for _ in range(SMALL)]
    assert gpu.cleared == cleared
    assert [x.counters.tolist() for x in own] == [[0, 0]] * SMALL
    assert len({x.counters.data_ptr() % 16 for x in own}) == 1
    assert apart([shared, *own])
    for each in own:
        each.release()  # has no effect: the graph keeps it
    gpu.capturing = False
    assert apart([*own, acquire_counters(GPU)])


def test_an_empty_bank_is_filled_before_the_next_graph(gpu: Machine) -> None:
    gpu.capturing = True
    assert acquire_counters(GPU).counters.tolist() == [0, 0]  # without a bank, a node of the graph clears them
    assert gpu.cleared == 1
    gpu.capturing = False
    fill_bank()
    gpu.capturing, cleared = True, gpu.cleared
    own = [acquire_counters(GPU) for _ in range(SMALL + 1)]
    assert gpu.cleared == cleared + 1  # none was left for the last one
    gpu.capturing = False
    fill_bank()
    gpu.capturing, cleared = True, gpu.cleared
    assert apart([*own, acquire_counters(GPU)])
    assert gpu.cleared == cleared
    assert len(module._banks[0]) == 2  # graphs still use the first


def test_graphs_do_not_use_pairs_that_are_being_cleared(gpu: Machine) -> None:
    """The capturing stream waits for them, but a graph may be replayed on another stream."""
    gpu.is_clearing = True
    for cleared in (False, True):
        fill_bank()
        gpu.capturing, before = True, gpu.cleared
        acquire_counters(GPU)
        assert gpu.cleared == before + (not cleared)
        gpu.capturing = gpu.is_clearing = False


class Slow(dict[int, int]):
    """Gives other threads the time to read the same number."""

    def get(self, *args: Any) -> Any:
        found = super().get(*args)
        sleep(0.01)
        return found


def test_threads_that_capture_at_once_have_their_own(gpu: Machine) -> None:
    fill_bank()
    gpu.capturing = True
    with mock.patch.object(module, "_taken", Slow(module._taken)), ThreadPoolExecutor(SMALL) as pool:
        assert apart([*pool.map(acquire_counters, [GPU] * SMALL)])


def test_counters_made_in_inference_mode_can_be_written_outside(gpu: Machine) -> None:
    with torch.inference_mode():
        first = acquire_counters(GPU)
    first.flags.zero_()
    first.release()
    with torch.inference_mode():
        fill_bank()
    gpu.capturing = True
    acquire_counters(GPU).counters.zero_()


def test_permanent_memory_comes_from_no_pool(gpu: Machine) -> None:
    """A first call in the warm-up of torch.compile(mode="reduce-overhead"): the next graph overwrites its pool."""
    gpu.pooled = {get_ident()}
    assert gpu.is_of_a_pool(torch.zeros((1,), dtype=torch.int32, device="cuda"))
    first = acquire_counters(GPU)
    assert gpu.waited == gpu.cleared - 1 == 2  # for the bank, and for the counters of the stream
    first.release()
    fill_bank()
    gpu.capturing = True
    own = acquire_counters(GPU)
    assert not any(map(gpu.is_of_a_pool, (first.counters, first.flags, own.counters, *module._banks[0])))


def test_nothing_is_kept_of_a_graph_captured_before_any_call(gpu: Machine) -> None:
    gpu.capturing = True
    own = acquire_counters(GPU)
    assert gpu.is_of_a_pool(own.counters)
    own.release()
    assert not module._banks and not module._free


def test_without_a_gpu() -> None:
    found = acquire_counters(torch.device("cpu"))
    assert found.counters.tolist() == [0, 0] and found.flags is None
    found.release()
