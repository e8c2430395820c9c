"""A GPU of a few processors: it runs the launches of a pass, as a chain where they are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest import mock

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtile.backends import gluon
from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu import kernel_launch as starts
from flashtile.backends.gpu import pdl
from flashtile.backends.gpu.kernel_launch import KernelLaunch, LaunchSequence
from tests.backends.gluon.emulator.language import python
from tests.backends.gluon.emulator.processor import Descriptor, Program, Role, me, running
from tests.backends.gluon.emulator.registers import MisuseError, argument
from tests.backends.gluon.emulator.turns import Turns

HOPPER = (9, 0)


class Launch:
    """A kernel, of so many programs, after another one. At once there are as many of them as processors.

    It begins when the one before is complete; or, where it is launched to follow it, when all of that one's programs
    have begun and say so (pdl.py).
    """

    def __init__(self, start: KernelLaunch, args: Sequence[Any], before: Launch | None, processors: int) -> None:
        self.name = start.kernel.fn.__name__
        self.programs = start.grid[0]
        self.before, self.relaxed = before, set[tuple[int, int]]()  # counters that tell nothing but their count
        self._work, self._room = python(start.kernel), processors
        self._follows = bool(start.options.get("launch_pdl"))
        self._args = [Descriptor(x) if isinstance(x, TensorDescriptor) else argument(x) for x in start.whole(args)]
        self._constants = {name: argument(x) for name, x in start.constants.items()}
        self._begun = 0
        self._led, self._ended = set[int](), set[int]()
        self._copies: list[Any] = []

    def add_to(self, turns: Turns) -> None:
        for number in range(self.programs):
            program = Program(number, self)
            role = Role(program, 4)
            agent = turns.add(program.name, lambda program=program: self._run(program), role)
            agent.until, agent.where = self._may_begin, "its launch"

    def _may_begin(self) -> bool:
        """In any order."""
        if self._begun - len(self._ended) >= self._room:
            return False
        if self.before is None:
            return True
        return self.before.leads if self._follows else self.before.complete

    def _run(self, program: Program) -> None:
        self._begun += 1
        self._work(*self._args, **self._constants)
        program.end()
        self._copies += program.copies
        self._ended.add(program.number)
        if self._follows and self.before and len(self._ended) == self.programs and not self.before.complete:
            raise MisuseError(f"{self.name} ends before {self.before.name}")

    @property
    def leads(self) -> bool:
        return len(self._led | self._ended) == self.programs

    @property
    def complete(self) -> bool:
        return len(self._ended) == self.programs and all(copy.is_there for copy in self._copies)

    def launch_dependents(self, program: Program) -> None:
        self._led.add(program.number)
        me().pause()

    def wait_for_previous(self) -> None:
        before = self.before
        if before is not None and self._follows:
            me().pause(lambda: before.complete, f"the end of {before.name}")


def run(steps: list[tuple[KernelLaunch, Sequence[Any]]], seed: int, processors: int) -> None:
    """Launches that come one after the other."""
    launches: list[Launch] = []
    for start, args in steps:
        launches.append(Launch(start, args, launches[-1] if launches else None, processors))
    turns = Turns(seed)
    with running(turns):
        for launch in launches:
            launch.add_to(turns)
        turns.run()


@contextmanager
def hopper(seed: int = 0, processors: int = 3) -> Iterator[list[str]]:
    """Have passes launched here. Kernels that are not Hopper's own, such as those that recompute, are left to Triton's
    interpreter; those that have something of Hopper's to recompute are told.
    """
    recomputed: list[str] = []

    def launch(series: LaunchSequence, *values: Any) -> None:
        steps = [(start, starts._given(args, values)) for start, args in series.steps]
        ours = [_is_ours(start) for start, _ in steps]
        assert ours == sorted(ours, reverse=True), "others come last"
        run(steps[: sum(ours)], seed, processors)
        for start, args in steps[sum(ours) :]:
            given = dict(zip(signature(start.kernel.fn).parameters, args, strict=False))
            if any(ours) and "flags" in given and given["flags"][: given["count"]].any():
                recomputed.append(start.kernel.fn.__name__)
            alone = {name: False if name == "PDL" else x for name, x in start.constants.items()}
            start.kernel[start.grid](*start.whole(args), **alone)

    with (
        mock.patch.object(LaunchSequence, "__call__", launch),
        mock.patch.object(gpu, "architecture", lambda _device: HOPPER),
        mock.patch.object(gpu, "processors", lambda _device: processors),
        mock.patch.object(pdl, "INTERPRETED", False),
    ):
        yield recomputed


def _is_ours(start: KernelLaunch) -> bool:
    return start.kernel.fn.__module__.startswith(gluon.__name__)
