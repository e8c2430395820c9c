"""The default number of CPU threads, and whether this process was forked.

The order of precedence: threads=, FLASHTILE_THREADS, torch.get_num_threads() for tensors, OMP_NUM_THREADS, and the
number of cores of this process.
"""

import os
from functools import cache

VARIABLES = ("FLASHTILE_THREADS", "OMP_NUM_THREADS")
MAX_THREADS = 1 << 16  # the limit of threads=
_PROCESS = os.getpid()  # the process that imported the package
_FORKNOEXEC = 0x40  # Linux's flag of a process that was forked without exec


def is_forked() -> bool:
    """Whether this process was forked: threads that were started before, for example by torch, are gone."""
    return os.getpid() != _PROCESS or bool(_process_flags() & _FORKNOEXEC)


def _process_flags() -> int:
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[6])
    except OSError:  # not Linux; only its OpenMP runtime hangs in a fork
        return 0


def cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def from_environment(variable: str = VARIABLES[0]) -> int | None:
    """Return the number in an environment variable; None if it is not set, or invalid."""
    value = os.environ.get(variable, "")
    return min(int(value), MAX_THREADS) if value.isdecimal() and int(value) > 0 else None


@cache
def default() -> int:
    return next((n for variable in VARIABLES if (n := from_environment(variable))), cores())
