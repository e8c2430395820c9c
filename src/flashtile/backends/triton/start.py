"""Start: a kernel with its grid and constants. Its first start compiles it; the others go straight to the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import triton
from triton.runtime import driver

from flashtile.backends.triton.arguments import INTERPRETED, Rows
from flashtile.backends.triton.launcher import Launcher, can_launch

Strides = tuple[int, int, int]
Maker = Callable[[Any], Any]
_HOOKS: Any = triton.knobs.runtime


class Start:
    """Started with arguments of the same kind each time: the same integers, types and alignments, other pointers.

    Triton's own way looks at every argument anew, to find the compiled kernel that suits them, and encodes every
    descriptor anew; for a small call that takes longer than the kernel does.

    Where the kernel takes Rows or a descriptor, a call may give the tensor alone: `rows` has the strides of those at
    these places, `blocks` what makes their descriptors; None there stands for an argument of None.
    """

    __slots__ = ("_direct", "absent", "blocks", "constants", "grid", "kernel", "options", "rows")

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
        self.options = options or {}
        self.rows = rows or {}
        self.blocks = {n: make for n, make in (blocks or {}).items() if make is not None}
        self.absent = [n for n, make in (blocks or {}).items() if make is None]
        self._direct: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        if self._direct is None or _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls:
            # A profiler that wants to hear of launches does by Triton's own way.
            compiled = self.kernel[self.grid](*self.whole(args), **self.constants, **self.options)
            self._direct = None if INTERPRETED else _direct(compiled, self, args)
        else:
            self._direct(*args)

    def whole(self, args: Iterable[Any]) -> list[Any]:
        """The arguments of a call as the kernel takes them."""
        found = [*args]
        for n, strides in self.rows.items():
            found[n] = Rows(found[n], *strides)
        for n, make in self.blocks.items():
            found[n] = make(found[n])
        for n in self.absent:
            found[n] = None
        return found


def _direct(compiled: Any, start: Start, args: tuple[Any, ...]) -> Callable[..., None]:
    """The compiled kernel as a function of what a call gives, past all of Triton that it can do without."""
    grid, constants = start.grid, tuple(start.constants.values())
    stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()
    before = (compiled.packed_metadata, None, None, None)

    def by_triton(*given: Any) -> None:
        compiled.run(*grid, stream_of(device), compiled.function, *before, *start.whole(given), *constants)

    if not can_launch(compiled, len(start.blocks)):
        return by_triton
    return Launcher(compiled, grid, args, start.whole(args)).on(device, stream_of, by_triton)
