"""How many CPU threads a call may use, when it does not say; and whether there can be any from before.

threads= goes first, then FLASHTILE_THREADS; then, for tensors, torch.get_num_threads(); then OMP_NUM_THREADS; then as
many as this process has cores.
"""

from __future__ import annotations

import os
from functools import cache

VARIABLES = ("FLASHTILE_THREADS", "OMP_NUM_THREADS")
MOST = 1 << 16  # that a call may ask for
_PROCESS = os.getpid()  # that imported the package
_FORKNOEXEC = 0x40  # Linux's flag of a process that was forked and runs the same program


def is_forked() -> bool:
    """Whether this process was forked: it has none of the threads that were started before, by torch for one."""
    return os.getpid() != _PROCESS or bool(_process_flags() & _FORKNOEXEC)


def _process_flags() -> int:
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[6])
    except OSError:  # not Linux, whose runtime of OpenMP alone hangs in a fork
        return 0


def cores() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def from_environment(variable: str = VARIABLES[0]) -> int | None:
    """What the environment asks for; None where it says nothing, or nothing sensible."""
    value = os.environ.get(variable, "")
    return min(int(value), MOST) if value.isdecimal() and int(value) > 0 else None


@cache
def default() -> int:
    return next((n for variable in VARIABLES if (n := from_environment(variable))), cores())
