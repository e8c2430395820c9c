"""Start: a kernel with its grid and constants. Its first start compiles it; the others go straight to the driver."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any

import torch
import triton

from flashtile.backends.triton.arguments import INTERPRETED

MOST_ENCODED = 256  # descriptors remembered


class Start:
    """Started with arguments of the same kind each time: the same integers, types and alignments, other pointers.

    Triton's own way looks at every argument anew, to find the compiled kernel that suits them, and encodes every
    descriptor anew; for a small call that takes longer than the kernel does.
    """

    __slots__ = ("_direct", "constants", "grid", "kernel", "options")

    def __init__(self, kernel: Any, programs: int, options: dict[str, Any] | None = None, **constants: Any) -> None:
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        self.constants = constants  # in the order of the kernel's parameters, which end with them
        self.options = options or {}
        self._direct: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        if self._direct is None or _watched():
            compiled = self.kernel[self.grid](*args, **self.constants, **self.options)
            self._direct = None if INTERPRETED else _direct(compiled, self.grid, tuple(self.constants.values()), args)
        else:
            self._direct(*args)


def _direct(compiled: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """The compiled kernel as a function of its arguments, past all of Triton that it can do without."""
    launcher = compiled.run
    before = (compiled.packed_metadata, None, None, None)
    described = [n for n, x in enumerate(args) if hasattr(x, "block_shape")]
    raw = None
    on_nvidia = type(launcher).__name__ == "CudaLauncher"
    if on_nvidia and launcher.global_scratch_size == launcher.profile_scratch_size == 0:
        raw = getclosurevars(launcher.launch).nonlocals.get("launcher") if described else launcher.launch
    if raw is None:

        def by_triton(*given: Any) -> None:
            launcher(*grid, _stream(), compiled.function, *before, *given, *constants)

        return by_triton
    fixed = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *before)

    def straight(*given: Any) -> None:
        raw(*grid, _stream(), *fixed, *given, *constants)

    if not described:
        return straight
    from triton.backends.nvidia.driver import make_tensordesc_arg

    metadata = dict(zip(described, compiled.metadata.tensordesc_meta, strict=True))
    encoded: dict[tuple[int, int], list[Any]] = {}

    def with_descriptors(*given: Any) -> None:
        flat: list[Any] = []
        done = 0
        for n in described:
            key = (n, given[n].base.data_ptr())
            found = encoded.get(key)
            if found is None:
                if len(encoded) >= MOST_ENCODED:
                    encoded.clear()
                found = encoded[key] = make_tensordesc_arg(given[n], metadata[n])
            flat += given[done:n]
            flat += found
            done = n + 1
        raw(*grid, _stream(), *fixed, *flat, *given[done:], *constants)

    return with_descriptors


def _stream() -> Any:
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def _watched() -> bool:
    """Whether a profiler wants to hear of launches; it then does by Triton's own way."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
