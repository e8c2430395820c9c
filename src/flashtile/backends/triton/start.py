"""Start: a kernel with its grid and constants. Its first start compiles it; the others go straight to the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import getclosurevars
from typing import Any

import triton
from triton.runtime import driver

from flashtile.backends.triton.arguments import INTERPRETED, Rows

MOST_ENCODED = 256  # descriptors remembered
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
    launcher, grid, constants = compiled.run, start.grid, tuple(start.constants.values())
    stream_of, device = driver.active.get_current_stream, driver.active.get_current_device()
    before = (compiled.packed_metadata, None, None, None)
    raw = None
    on_nvidia = type(launcher).__name__ == "CudaLauncher"
    if on_nvidia and launcher.global_scratch_size == launcher.profile_scratch_size == 0:
        raw = getclosurevars(launcher.launch).nonlocals.get("launcher") if start.blocks else launcher.launch
    if raw is None:

        def by_triton(*given: Any) -> None:
            launcher(*grid, stream_of(device), compiled.function, *before, *start.whole(given), *constants)

        return by_triton
    fixed = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *before)
    rows, absent = [*start.rows.items()], start.absent
    dressed = {*start.rows, *start.blocks, *absent}
    bare = [n for n, x in enumerate(args) if hasattr(x, "data_ptr") and n not in dressed]
    encode = _encoder(compiled, start.blocks) if start.blocks else None

    def straight(*given: Any) -> None:
        args = [*given]
        # Addresses are numbers at once: of each tensor the launcher would ask the driver whether the GPU can reach it.
        for n, strides in rows:
            args[n] = (args[n].data_ptr(), *strides)
        for n in bare:
            args[n] = args[n].data_ptr()
        for n in absent:
            args[n] = None
        if encode is not None:
            encode(args)
        raw(*grid, stream_of(device), *fixed, *args, *constants)

    return straight


def _encoder(compiled: Any, blocks: dict[int, Maker]) -> Callable[[list[Any]], None]:
    """What puts encoded descriptors, each of several arguments, in the places of tensors."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    makers = [(n, blocks[n], meta) for n, meta in zip(sorted(blocks), compiled.metadata.tensordesc_meta, strict=True)]
    makers.reverse()  # so that the places before stay where they are
    encoded: dict[tuple[int, int], list[Any]] = {}

    def encode(args: list[Any]) -> None:
        for n, make, meta in makers:
            key = (n, args[n].data_ptr())
            found = encoded.get(key)
            if found is None:
                if len(encoded) >= MOST_ENCODED:
                    encoded.clear()
                found = encoded[key] = make_tensordesc_arg(make(args[n]), meta)
            args[n : n + 1] = found

    return encode
