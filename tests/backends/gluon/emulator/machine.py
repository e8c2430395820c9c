"""A GPU of a few processors: it runs the launches of a pass, overlapping them if they are launched with PDL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtile.backends import gluon
from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu import pdl
from flashtile.backends.gpu.kernel_launch import BoundLaunch, KernelLaunch, LaunchSequence, resolve
from tests.backends.gluon.emulator.language import python
from tests.backends.gluon.emulator.processor import Descriptor, Program, Role, me, running
from tests.backends.gluon.emulator.registers import MisuseError, argument
from tests.backends.gluon.emulator.turns import Turns

HOPPER = (9, 0)


class Launch:
    """A launch of several programs, after another launch. As many of them run at once as there are processors.

    It begins when the previous launch is complete or, with PDL, once all programs of that launch have begun and called
    launch_dependents() (pdl.py).
    """

    def __init__(self, launch: KernelLaunch, args: Sequence[Any], before: Launch | None, processors: int) -> None:
        self.name = launch.kernel.fn.__name__
        self.programs = launch.grid[0]
        self.before, self.relaxed = before, set[tuple[int, int]]()  # counters that were added to without a release
        self._work, self._processors = python(launch.kernel), processors
        self._uses_pdl = bool(launch.options.get("launch_pdl"))
        given = launch.kernel_args(args)
        self._args = [Descriptor(x) if isinstance(x, TensorDescriptor) else argument(x) for x in given]
        self._constants = {name: argument(x) for name, x in launch.constants.items()}
        self._begun = 0
        self._launched_dependents, self._ended = set[int](), set[int]()
        self._copies: list[Any] = []

    def add_to(self, turns: Turns) -> None:
        for number in range(self.programs):
            program = Program(number, self)
            role = Role(program, 4)
            agent = turns.add(program.name, lambda program=program: self._run(program), role)
            agent.until, agent.where = self._may_begin, "its launch"

    def _may_begin(self) -> bool:
        """Whether another program may begin; they begin in any order."""
        if self._begun - len(self._ended) >= self._processors:
            return False
        if self.before is None:
            return True
        return self.before.dependents_may_begin if self._uses_pdl else self.before.complete

    def _run(self, program: Program) -> None:
        self._begun += 1
        self._work(*self._args, **self._constants)
        program.end()
        self._copies += program.copies
        self._ended.add(program.number)
        if self._uses_pdl and self.before and len(self._ended) == self.programs and not self.before.complete:
            raise MisuseError(f"{self.name} ends before {self.before.name}")

    @property
    def dependents_may_begin(self) -> bool:
        return len(self._launched_dependents | self._ended) == self.programs

    @property
    def complete(self) -> bool:
        return len(self._ended) == self.programs and all(copy.is_there for copy in self._copies)

    def launch_dependents(self, program: Program) -> None:
        self._launched_dependents.add(program.number)
        me().pause()

    def wait_for_previous(self) -> None:
        before = self.before
        if before is not None and self._uses_pdl:
            me().pause(lambda: before.complete, f"the end of {before.name}")


def run(bound: Sequence[BoundLaunch], values: tuple[Any, ...], seed: int, processors: int) -> None:
    """Run launches that come one after the other, on the values of a call."""
    launches: list[Launch] = []
    for launch, args in bound:
        before = launches[-1] if launches else None
        launches.append(Launch(launch, resolve(args, values), before, processors))
    turns = Turns(seed)
    with running(turns):
        for each in launches:
            each.add_to(turns)
        turns.run()


@contextmanager
def hopper(seed: int = 0, processors: int = 3) -> Iterator[list[str]]:
    """Run passes on this machine. Triton's interpreter runs the portable kernels, such as those that recompute tiles.

    Gives the names of the kernels that had a tile of a Hopper kernel to recompute.
    """
    recomputed: list[str] = []

    def launch_all(sequence: LaunchSequence, *values: Any) -> None:
        ours = [_is_ours(launch) for launch, _ in sequence.launches]
        assert ours == sorted(ours, reverse=True), "the portable kernels come last"
        run(sequence.launches[: sum(ours)], values, seed, processors)
        for launch, args in sequence.launches[sum(ours) :]:
            given = resolve(args, values)
            named = dict(zip(launch.parameters, given, strict=True))
            if any(ours) and "flags" in named and named["flags"][: named["count"]].any():
                recomputed.append(launch.kernel.fn.__name__)
            constants = {name: False if name == "PDL" else x for name, x in launch.constants.items()}
            launch.kernel[launch.grid](*launch.kernel_args(given), **constants)

    with (
        mock.patch.object(LaunchSequence, "__call__", launch_all),
        mock.patch.object(gpu, "architecture", lambda _device: HOPPER),
        mock.patch.object(gpu, "processors", lambda _device: processors),
        mock.patch.object(pdl, "INTERPRETED", False),
    ):
        yield recomputed


def _is_ours(launch: KernelLaunch) -> bool:
    return launch.kernel.fn.__module__.startswith(gluon.__name__)
