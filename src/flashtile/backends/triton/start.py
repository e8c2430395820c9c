"""Start: a kernel with its grid and constants. Its first start compiles it; the others go straight to the driver."""

from __future__ import annotations

from typing import Any

import torch
import triton

from flashtile.backends.triton.arguments import INTERPRETED


class Start:
    """Started with arguments of the same kind each time: the same integers, types and alignments, other pointers.

    Triton's own way looks at every argument anew, to find the compiled kernel that suits them; for a small call that
    takes longer than the kernel does.
    """

    __slots__ = ("_compiled", "constants", "grid", "kernel", "options")

    def __init__(self, kernel: Any, programs: int, options: dict[str, Any] | None = None, **constants: Any) -> None:
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        self.constants = constants  # in the order of the kernel's parameters, which end with them
        self.options = options or {}
        self._compiled: Any = None

    def __call__(self, *args: Any) -> None:
        compiled = self._compiled
        if compiled is None or _watched():
            compiled = self.kernel[self.grid](*args, **self.constants, **self.options)
            self._compiled = None if INTERPRETED else compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        compiled.run(
            *self.grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *args,
            *self.constants.values(),
        )


def _watched() -> bool:
    """Whether a profiler wants to hear of launches; it then does by Triton's own way."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
