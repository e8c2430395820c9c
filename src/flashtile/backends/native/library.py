"""Find the C++ core, and load the build for the best instruction set of this machine."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

# Best first, with the CPU flags (as Linux names them) that each adds; abm includes LZCNT, on Intel too.
_X86 = {
    "x86-64-v4-bf16": {"avx512_bf16"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"abm", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"},
}


def directory() -> Path:
    """The folder of the libraries: that of this file, unless FLASHTILE_NATIVE_DIR names a build directory."""
    return Path(os.environ.get("FLASHTILE_NATIVE_DIR") or Path(__file__).parent)


def candidates() -> list[str]:
    """The instruction sets that this machine supports, best first."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ["aarch64"]
    if machine not in ("x86_64", "amd64"):
        return ["generic"]
    flags = _cpu_flags()
    levels = list(_X86)
    # Each level includes those after it.
    usable = [level for i, level in enumerate(levels) if all(_X86[needed] <= flags for needed in levels[i:])]
    return [*usable, "generic"]


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return set()
    return set(line.partition(":")[2].split())


@cache
def _find() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or None and the reason."""
    wanted = [directory() / f"libflashtile-{isa}.so" for isa in candidates()]
    path = next((path for path in wanted if path.exists()), None)
    if path is None:
        return None, f"no compiled core for this machine in {directory()} ({', '.join(p.name for p in wanted)})"
    try:
        return ctypes.CDLL(str(path)), ""
    except OSError as error:
        return None, f"the compiled core does not load: {error}"


def why_not() -> str | None:
    """Why the core cannot run; None if it can."""
    return _find()[1] or None


@cache
def load() -> ctypes.CDLL:
    """Load the library and declare its functions, which take the packed struct by its address."""
    from flashtile.host import threads  # not at the top: make runs this file alone for candidates()

    library, reason = _find()
    if library is None:
        raise OSError(reason)
    i64, u64, pointer = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    for name in ("ft_forward", "ft_backward"):
        getattr(library, name).argtypes = [pointer]
    library.ft_merge.argtypes = [i64] * 3 + [pointer] * 4
    library.ft_cuts.argtypes = [i64] * 7 + [pointer]
    library.ft_span_cuts.argtypes = [*[i64] * 7, pointer, i64, pointer]
    library.ft_keep.argtypes = [u64, i64, i64, i64, i64, ctypes.c_double, pointer]
    library.ft_cuts.restype = library.ft_span_cuts.restype = library.ft_keep.restype = library.ft_after_fork.restype = (
        None
    )
    library.ft_isa.restype = ctypes.c_char_p
    if threads.is_forked():
        library.ft_after_fork()
    return library


def isa() -> str:
    """The instruction set of the build in use."""
    name: bytes = load().ft_isa()
    return name.decode()
