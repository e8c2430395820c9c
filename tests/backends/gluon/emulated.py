"""Calls by the Hopper kernels on the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flashtile as ft
from flashtile import dispatch
from flashtile.backends import gluon
from flashtile.problem import Problem, describe
from flashtile.pytorch.eight_bits import stack_factors
from tests.backends.gluon.emulator.machine import hopper
from tests.backends.triton import kernels
from tests.gpu.placement import canaries
from tests.support.eight_bits import EightBitCall
from tests.support.grid import Call
from tests.support.runners import Runner

# For test modules. The interpreter, which runs the kernels that recompute, uses NumPy: it warns about the log of 0,
# about products with NaN, and about its own deprecations.
marks = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on the GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]


@contextmanager
def machine(seed: int, processors: int = 3, recomputes: bool | None = False) -> Iterator[None]:
    """Run on the emulator, with memory that holds poison at first and beside what is allocated.

    recomputes: whether tiles have to be recomputed; None: they may. Unexpected, that would hide an error.
    """
    with hopper(seed, processors) as recomputed, canaries() as birds:
        yield
    assert birds.untouched(), "memory beside a result was written to"
    assert recomputes is None or recomputes == bool(recomputed), f"tiles were recomputed by {recomputed}"


def emulated(
    seed: int = 0, processors: int = 3, recomputes: tuple[bool | None, bool | None] = (False, False)
) -> Runner:
    """A runner whose roles take turns in an order of this seed. recomputes: in a forward, and in a backward pass."""

    def forward(call: Call) -> tuple[Any, Any]:
        with machine(seed, processors, recomputes[0]):
            return kernels.forward(call, "gluon")

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        with machine(seed, processors, recomputes[1]):
            return kernels.backward(call, out, lse, "gluon")

    return Runner(f"gluon {seed}", forward, backward, lambda call: _objection(kernels.problem_of(call)))


def _objection(problem: Problem) -> str | None:
    return dispatch.named("gluon").objection(problem, "cuda")


@dataclass(frozen=True)
class Emulated(EightBitCall):
    """8-bit calls."""

    seed: int = 0

    def run(self, device: str = "cpu", **more: Any) -> tuple[Any, Any]:
        options = self.options | more
        if "descale" in options:
            options["descale"] = stack_factors(options["descale"], self.q.device)
        problem = describe(self.q, self.k, self.v, **options)
        assert _objection(problem) is None
        with machine(self.seed):
            run, inputs = gluon.prepare(problem)
            out, lse = run.forward(inputs)
        return out, lse
