"""Waits, arrivals and fences of the Hopper kernels, removed line by line: the emulator notices each one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from inspect import getmembers, getsource
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

from flashtile.backends.gluon import (
    backward_kernel,
    backward_over_128,
    backward_producer,
    backward_scheduler,
    backward_up_to_128,
    dq,
    forward_epilogue,
    forward_kernel,
    forward_scheduler,
    row_kernels,
)
from tests.backends.gluon.emulated import Emulated, emulated, marks
from tests.backends.gluon.emulator.language import rewritten
from tests.backends.gluon.emulator.registers import MisuseError
from tests.backends.gluon.emulator.turns import StuckError
from tests.backends.gluon.test_emulated import (
    DIMS,
    PACKED,
    SIZES,
    check_counters,
    hide_nan,
    sums_of,
)
from tests.gpu.order_of_sums import order_sensitive
from tests.gpu.runner import check
from tests.support.grid import Case, Size, build, truth

pytestmark = marks
FORWARD, BACKWARD = (
    (forward_kernel, forward_epilogue, forward_scheduler),
    (backward_kernel, backward_up_to_128, backward_over_128, dq, backward_producer, backward_scheduler, row_kernels),
)
CALLS = (
    *("fence_async_shared", "sync", "arrive", r"mbarrier\.wait", r"mbarrier\.arrive", r"tma\.store_wait", "await_adds"),
    *(
        "await_buffer",
        "await_all_buffers",
        "wait_for_previous",
        "release_slot",
        "await_count",
        "clear_unused",
        "signal_dq_tile",
        "post_stop",
        "retire",
    ),
    "thread_barrier",
)
STATEMENT = re.compile(rf"\s+({'|'.join(CALLS)})\(.*\)(\s*#.*)?")
PRODUCTS = re.compile(r"warpgroup_mma_wait\((\d)")
# Lines whose removal goes unnoticed, and why they are there.
REDUNDANT = {
    "forward_kernel.skip_tiles: mbarrier.wait(shared.k.full.index(slot), phase)": "values come later",
    "backward_up_to_128.process_128_keys: sync(WARPGROUPS_MEET, WARPGROUPS)": "keys are used after the first dS",
    "backward_over_128.step: mbarrier.wait(shared.q_full.index(half), (t >> 1) & 1)": "P implies them",
    "backward_producer.load: sync(Q_FREE + ((t + 1) & 1), WITH_LOADER)": "the end of the kernel",
    "backward_producer.load: sync(DO_FREE + ((t + 1) & 1), WITH_LOADER)": "the end of the kernel",
    **dict.fromkeys(
        (
            "forward_kernel.consume: thread_barrier()",
            "forward_kernel.skip_empty_tasks: thread_barrier()",
            "forward_scheduler.post_stop: thread_barrier()",
            "backward_up_to_128.process_128_keys: thread_barrier()",
            "backward_producer.load: thread_barrier()",
        ),
        "an arrival next to it synchronizes the warps of the role",
    ),
}


class Line(NamedTuple):
    function: Any
    number: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.function.fn.__module__.rsplit('.', 1)[1]}.{self.function.fn.__name__}: {self.before}"


def lines(*modules: Any) -> Iterator[Line]:
    """The lines of these modules with such a call, or with a wait for products."""
    for module in modules:
        for _, function in getmembers(module):
            if getattr(getattr(function, "fn", None), "__module__", None) != module.__name__:
                continue
            for number, text in enumerate(dedent(getsource(function.fn)).splitlines()):
                if STATEMENT.fullmatch(text):
                    yield Line(function, number, text.strip(), "pass")
                elif found := PRODUCTS.search(text):
                    later = f"warpgroup_mma_wait({int(found[1]) + 1}"
                    yield Line(function, number, text.strip(), text.replace(found[0], later).strip())


def run_forward() -> None:
    check_counters()
    for seed in range(4):
        for n, (dim, option) in enumerate((dim, option) for option in ("causal", "plain", "window") for dim in DIMS):
            run(Case(SIZES[dim], "bfloat16", (option,)), 10 * seed + n, backward=False)
        for dim in DIMS:
            run(Case(Size.packed(4, 2, dim, dim, *PACKED), "bfloat16", ("causal",)), seed + dim, backward=False)
            replace(Emulated.draw((2, 8, 257, dim), (2, 2, 300, dim)), seed=seed + dim).check()


def run_backward() -> None:
    check_counters()
    for seed in range(4):
        for dim in DIMS:
            for option in ("causal", "plain", "window", "kv_lengths"):
                run(Case(SIZES[dim], "bfloat16", (option,)), seed + dim, backward=True)
            for option in ("causal", "plain"):
                run(Case(Size.packed(4, 2, dim, dim, *PACKED), "bfloat16", (option,)), seed + dim, backward=True)
            hide_nan(dim, seed)
            tile = 64 if dim == 256 else 128
            assert len(sums_of(order_sensitive(1, 3, 4 * tile, dim, tile), 3, deterministic=True)) == 1


def run(case: Case, seed: int, backward: bool) -> None:
    check(build(case), truth(case), emulated(seed, 1 + seed % 3), backward)


def check_noticed(line: Line, work: Any) -> None:
    with (
        rewritten(line.function, line.number, line.after),
        pytest.raises((AssertionError, MisuseError, StuckError)),
    ):
        work()


def is_redundant(line: Line) -> bool:
    return str(line) in REDUNDANT


@pytest.mark.slow
@pytest.mark.parametrize("work", [run_forward, run_backward])
def test_the_whole_kernels_pass(work: Any) -> None:
    work()


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in lines(*FORWARD) if not is_redundant(line)], ids=str)
def test_forward(line: Line) -> None:
    check_noticed(line, run_forward)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in lines(*BACKWARD) if not is_redundant(line)], ids=str)
def test_backward(line: Line) -> None:
    check_noticed(line, run_backward)


@pytest.mark.parametrize("line", [*lines(*FORWARD)][::6], ids=str)
def test_some(line: Line) -> None:
    if not is_redundant(line):
        check_noticed(line, run_forward)


def test_redundant_lines_exist() -> None:
    assert set(REDUNDANT) <= set(map(str, lines(*FORWARD, *BACKWARD)))
