"""Calls by the Hopper kernels, which the emulator runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flashtile as ft
from flashtile.backends import gluon
from flashtile.inputs import Inputs
from flashtile.problem import describe
from flashtile.pytorch.eight_bits import side_by_side
from tests.backends.gluon.emulator.machine import hopper
from tests.backends.triton import kernels
from tests.gpu.placement import canaries
from tests.support.eight_bits import EightBitCall
from tests.support.grid import Call
from tests.support.runners import Runner

# For modules of tests. The interpreter, which runs what mends, is NumPy: it warns of the log of 0, of products with
# NaN, and of its own habits.
marks = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on the GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]


@contextmanager
def machine(seed: int, processors: int = 3, mends: bool | None = False) -> Iterator[None]:
    """Whose memory is poison at first, and stays so beside what is asked for.

    mends: whether there is something to mend; None: there may be. Where nobody expects it, it hides what went wrong.
    """
    with hopper(seed, processors) as mended, canaries() as birds:
        yield
    assert birds.untouched(), "memory beside a result was written to"
    assert mends is None or mends == bool(mended), f"to be mended, by {mended}"


def emulated(seed: int = 0, processors: int = 3, mends: tuple[bool | None, bool | None] = (False, False)) -> Runner:
    """Runs whose roles take turns in an order of this seed. mends: in a forward, and in a backward pass."""

    def forward(call: Call) -> tuple[Any, Any]:
        with machine(seed, processors, mends[0]):
            return kernels.forward(call, "gluon")

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        with machine(seed, processors, mends[1]):
            return kernels.backward(call, out, lse, "gluon")

    return Runner(f"gluon {seed}", forward, backward, lambda call: gluon.why_not(kernels.problem_of(call)))


@dataclass(frozen=True)
class Emulated(EightBitCall):
    """8-bit calls."""

    seed: int = 0

    def run(self, device: str = "cpu", **more: Any) -> tuple[Any, Any]:
        options = self.options | more
        if "descale" in options:
            options["descale"] = side_by_side(options["descale"], self.q.device)
        problem = describe(self.q, self.k, self.v, **options)
        assert gluon.why_not(problem) is None
        with machine(self.seed):
            run, problem = gluon.prepare(problem)
            out, lse = run.forward(Inputs.of(problem))
        return out, lse
