"""Calls by the Hopper kernels, which the emulator runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flashtile as ft
from flashtile.backends.gluon import why_not
from flashtile.backends.gluon.passes import Prepared
from flashtile.inputs import Inputs
from flashtile.problem import describe
from flashtile.pytorch.eight_bits import side_by_side
from tests.backends.gluon.emulator.machine import hopper
from tests.backends.triton import kernels
from tests.eight_bits import Eight
from tests.gpu.placing import canaries
from tests.grid import Call
from tests.runners import Runner


@contextmanager
def machine(seed: int, processors: int = 3, mends: bool = False) -> Iterator[None]:
    """Whose memory is poison at first, and stays so beside what is asked for.

    mends: there may be something to mend; elsewhere that would hide what went wrong.
    """
    with hopper(seed, processors) as mended, canaries() as birds:
        yield
    assert birds.untouched(), "memory beside a result was written to"
    assert mends or not mended, f"{mended} had something to do"


def emulated(seed: int = 0, processors: int = 3, mends: bool = False) -> Runner:
    """Runs whose roles take turns in an order of this seed."""

    def forward(call: Call) -> tuple[Any, Any]:
        with machine(seed, processors, mends):
            return kernels.forward(call, Prepared)

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        with machine(seed, processors, mends):
            return kernels.backward(call, out, lse, Prepared)

    return Runner(f"gluon {seed}", forward, backward, lambda call: why_not(kernels.problem_of(call)))


class Emulated(Eight):
    """8-bit calls; `device` is the seed."""

    def run(self, device: str = "0", **more: Any) -> tuple[Any, Any]:
        options = self.options | more
        if "descale" in options:
            options["descale"] = side_by_side(options["descale"], self.q.device)
        problem = describe(self.q, self.k, self.v, **options)
        assert why_not(problem) is None
        with machine(int(device)):
            out, lse = Prepared(problem).forward(Inputs.of(problem))
        return out, lse
