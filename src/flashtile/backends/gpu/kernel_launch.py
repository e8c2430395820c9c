"""KernelLaunch: a kernel with its grid and constants, started by Triton. LaunchSequence: Starts that go straight to the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import triton
from triton.runtime import driver

from flashtile.backends.gpu.arguments import INTERPRETED, Rows
from flashtile.backends.gpu.device import bind_context
from flashtile.backends.gpu.launcher import Launcher, can_launch

Strides = tuple[int, int, int]
Maker = Callable[[Any], Any]
_HOOKS: Any = triton.knobs.runtime
FUSED = {"enable_fp_fusion": True}  # a * b + c is rounded once: until Triton 3.9 so unless one says otherwise


class KernelLaunch:
    """Where the kernel takes Rows or a descriptor, a call may give the tensor alone.

    `rows` has the strides of those at these places, `blocks` what makes their descriptors; None there stands for an
    argument of None. `compiled` is the kernel as it was started last.
    """

    __slots__ = ("absent", "blocks", "compiled", "constants", "grid", "kernel", "options", "rows")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        options: dict[str, Any] | None = None,
        rows: dict[int, Strides] | None = None,
        blocks: dict[int, Maker | None] | None = None,
        **constants: Any,
    ) -> None:
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        self.constants = constants  # in the order of the kernel's parameters, which end with them
        self.options = FUSED | (options or {})
        self.rows = rows or {}
        self.blocks = {n: make for n, make in (blocks or {}).items() if make is not None}
        self.absent = [n for n, make in (blocks or {}).items() if make is None]
        self.compiled: Any = None

    def __call__(self, *args: Any) -> None:
        self.compiled = self.kernel[self.grid](*self.whole(args), **self.constants, **self.options)

    def again(self, args: Iterable[Any], stream: int) -> None:
        """Started by Triton's launcher, past the look at every argument that finds the compiled kernel."""
        run, before = self.compiled.run, (self.compiled.packed_metadata, None, None, None)
        run(*self.grid, stream, self.compiled.function, *before, *self.whole(args), *self.constants.values())

    def whole(self, args: Iterable[Any]) -> list[Any]:
        """The arguments of a call as the kernel takes them."""
        found = [*args]
        for n, strides in self.rows.items():
            found[n] = Rows(found[n], *strides)
        if self.blocks:
            bind_context()
        for n, make in self.blocks.items():
            found[n] = make(found[n])
        for n in self.absent:
            found[n] = None
        return found


def present(*strides: Strides | None) -> dict[int, Strides]:
    """What a KernelLaunch is told of its first arguments; None of one that is no Rows, or absent."""
    return {n: s for n, s in enumerate(strides) if s is not None}


class Argument(NamedTuple):
    """An argument that is one of the values of a call, or lies in its memory so many bytes on; `make` says as what."""

    place: int
    offset: int = 0
    make: Maker | None = None

    def of(self, value: Any) -> Any:
        return value if self.make is None else self.make(value)


BoundLaunch = tuple[KernelLaunch, tuple[Any, ...]]


class LaunchSequence:
    """Starts that follow each other; an Argument among their arguments stands for a value that the call gives.

    The values are tensors and tuples, of the same kind each time: the same types and alignments, other pointers.
    Triton's own way looks at every argument anew, to find the compiled kernel that suits them, and encodes every
    descriptor anew; for a small call that takes longer than the kernels do. So it is gone once, and after that the
    driver is told where the values of the call lie.
    """

    __slots__ = ("_direct", "steps")

    def __init__(self, *steps: BoundLaunch) -> None:
        self.steps = steps
        self._direct: Callable[[tuple[Any, ...]], None] | None = None

    def __call__(self, *values: Any) -> None:
        if self._direct is None or _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls:
            # A profiler that wants to hear of launches does by Triton's own way.
            for start, args in self.steps:
                start(*_given(args, values))
            self._direct = self._find_direct(values)
        else:
            self._direct(values)

    def _find_direct(self, values: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], None] | None:
        """What starts all of them, past all of Triton that they can do without."""
        if INTERPRETED or not self.steps or any(start.compiled is None for start, _ in self.steps):
            return None
        stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()

        def by_triton(values: tuple[Any, ...], first: int = 0) -> None:
            for start, args in self.steps[first:]:
                start.again(_given(args, values), stream_of(device))

        if not all(can_launch(start.compiled, len(start.blocks)) for start, _ in self.steps):
            return by_triton
        launcher = Launcher()
        for start, args in self.steps:
            places = [(x.place, x.offset) if isinstance(x, Argument) else None for x in args]
            given = _given(args, values)
            launcher.add(start.compiled, start.grid, places, given, start.whole(given))
        return launcher.on(device, stream_of, by_triton)


def _given(args: tuple[Any, ...], values: tuple[Any, ...]) -> list[Any]:
    """The arguments of a step in a call of these values."""
    return [x.of(values[x.place]) if isinstance(x, Argument) else x for x in args]
