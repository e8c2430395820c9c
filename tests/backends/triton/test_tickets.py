"""Tickets: who shares them, who has them alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from flashtile.backends.triton import tickets as module  # noqa: E402
from flashtile.backends.triton.tickets import BANK, tickets  # noqa: E402

GPU = SimpleNamespace(type="cuda", index=0)
plain_zeros = torch.zeros


class Machine:
    """A GPU as tickets() sees it."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.cleared = 1, False, 0

    def zeros(self, n: int, **_: Any) -> Any:
        self.cleared += 1
        return plain_zeros(n, dtype=torch.int32)


@pytest.fixture
def gpu() -> Iterator[Machine]:
    machine = Machine()
    with (
        mock.patch.multiple(module, _of_stream={}, _banks={}, _taken={}),
        mock.patch.object(torch, "zeros", machine.zeros),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: machine.stream, create=True),
    ):
        yield machine


def place(x: Any) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()


def apart(x: Any, y: Any) -> bool:
    return place(x)[1] <= place(y)[0] or place(y)[1] <= place(x)[0]


def test_launches_of_a_stream_share_them(gpu: Machine) -> None:
    first = tickets(8, GPU)
    cleared = gpu.cleared
    assert tickets(100, GPU) is first
    assert gpu.cleared == cleared
    more = tickets(5000, GPU)
    assert more.numel() >= 5000
    assert tickets(8, GPU) is more
    gpu.stream = 2
    assert apart(tickets(8, GPU), more)


def test_launches_in_graphs_have_their_own_and_clear_nothing(gpu: Machine) -> None:
    shared = tickets(8, GPU)
    gpu.capturing, cleared = True, gpu.cleared
    own = [tickets(n, GPU) for n in (8, 3, 5, 8)]
    assert gpu.cleared == cleared
    assert [x.numel() for x in own] == [8, 3, 5, 8]
    assert all(x.data_ptr() % 16 == own[0].data_ptr() % 16 for x in own)
    every = [shared, *own]
    assert all(apart(x, y) for n, x in enumerate(every) for y in every[:n])


def test_an_empty_bank_is_filled_before_the_next_graph(gpu: Machine) -> None:
    gpu.capturing = True
    assert tickets(8, GPU).numel() == 8  # there is no bank yet: a node of the graph clears them
    assert gpu.cleared == 1
    gpu.capturing = False
    tickets(8, GPU)
    gpu.capturing, cleared = True, gpu.cleared
    old = tickets(BANK // 2 + 4, GPU)
    assert tickets(BANK // 2, GPU).numel() == BANK // 2  # more than is left
    assert gpu.cleared == cleared + 1
    gpu.capturing = False
    tickets(8, GPU)
    gpu.capturing, cleared = True, gpu.cleared
    assert apart(tickets(BANK // 2, GPU), old)
    assert gpu.cleared == cleared
    assert len(module._banks[0]) == 2  # graphs still point into the first


def test_without_a_gpu() -> None:
    found = tickets(3, torch.device("cpu"))
    assert found.tolist() == [0, 0, 0]
