"""Tickets: who shares them, who has them alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from flashtile.backends.gluon import tickets as module  # noqa: E402
from flashtile.backends.gluon.tickets import Tickets, tickets  # noqa: E402

GPU = SimpleNamespace(type="cuda", index=0)
SMALL = 4  # pairs of a bank
plain_zeros = torch.zeros


class Machine:
    """A GPU as tickets() sees it."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.cleared = 1, False, 0

    def zeros(self, shape: Any, **_: Any) -> Any:
        self.cleared += 1
        return plain_zeros(shape, dtype=torch.int32)


@pytest.fixture
def gpu() -> Iterator[Machine]:
    machine = Machine()
    with (
        mock.patch.multiple(module, _of_stream={}, _banks={}, _taken={}, BANK=SMALL),
        mock.patch.object(torch, "zeros", machine.zeros),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: machine.stream, create=True),
    ):
        yield machine


def apart(found: list[Tickets]) -> bool:
    """Whether no two share a number, nor any a number of its own."""
    parts = [x for each in found for x in each[:2] if x is not None]
    places = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in parts)
    return all(end <= begin for (_, end), (begin, _) in pairwise(places))


def test_launches_of_a_stream_have_them_after_each_other(gpu: Machine) -> None:
    first = tickets(GPU)
    assert first.pair.tolist() == [0, 0] and first.marks.numel() == module.MOST_MARKS
    assert first.pair.data_ptr() % 16 == first.marks.data_ptr() % 16
    first.give_back()
    cleared = gpu.cleared
    assert tickets(GPU) is first
    assert gpu.cleared == cleared
    first.give_back()
    gpu.stream = 2
    assert apart([tickets(GPU), first])


def test_nobody_has_what_was_not_given_back(gpu: Machine) -> None:
    """As threads that launch on one stream at once, and a launch that failed."""
    first, second = tickets(GPU), tickets(GPU)
    assert apart([first, second])
    second.give_back()
    assert tickets(GPU) is second
    assert apart([first, second, tickets(GPU)])


def test_launches_in_graphs_have_their_own_and_clear_nothing(gpu: Machine) -> None:
    shared = tickets(GPU)
    gpu.capturing, cleared = True, gpu.cleared
    own = [tickets(GPU) for _ in range(SMALL)]
    assert gpu.cleared == cleared
    assert [x.pair.tolist() for x in own] == [[0, 0]] * SMALL
    assert len({x.pair.data_ptr() % 16 for x in own}) == 1
    assert apart([shared, *own])
    for each in own:
        each.give_back()  # of no use to anybody: the graph has it as long as it is there
    gpu.capturing = False
    assert apart([*own, tickets(GPU)])


def test_an_empty_bank_is_filled_before_the_next_graph(gpu: Machine) -> None:
    gpu.capturing = True
    assert tickets(GPU).pair.tolist() == [0, 0]  # there is no bank yet: a node of the graph clears them
    assert gpu.cleared == 1
    gpu.capturing = False
    tickets(GPU)
    gpu.capturing, cleared = True, gpu.cleared
    own = [tickets(GPU) for _ in range(SMALL + 1)]
    assert gpu.cleared == cleared + 1  # the last one found none left
    gpu.capturing = False
    tickets(GPU)
    gpu.capturing, cleared = True, gpu.cleared
    assert apart([*own, tickets(GPU)])
    assert gpu.cleared == cleared
    assert len(module._banks[0]) == 2  # graphs still point into the first


class Slow(dict[int, int]):
    """Leaves other threads the time to ask the same."""

    def get(self, *args: Any) -> Any:
        found = super().get(*args)
        sleep(0.01)
        return found


def test_threads_that_capture_at_once_have_their_own(gpu: Machine) -> None:
    tickets(GPU)
    gpu.capturing = True
    with mock.patch.object(module, "_taken", Slow(module._taken)), ThreadPoolExecutor(SMALL) as pool:
        assert apart([*pool.map(tickets, [GPU] * SMALL)])


def test_tickets_made_in_inference_mode_are_good_for_all(gpu: Machine) -> None:
    with torch.inference_mode():
        first = tickets(GPU)
    first.marks.zero_()
    first.give_back()
    gpu.capturing = True
    tickets(GPU).pair.zero_()


def test_without_a_gpu() -> None:
    found = tickets(torch.device("cpu"))
    assert found.pair.tolist() == [0, 0] and found.marks is None
    found.give_back()
