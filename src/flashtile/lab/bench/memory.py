"""Peak memory of one call: the growth of a fresh process beyond its inputs while the call runs."""

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flashtile.lab.bench import workload
from flashtile.lab.bench.cases import FORWARD, TRAINING, Case
from flashtile.lab.bench.timing import Call

BACKWARD = "backward"
OURS_NUMPY = workload.OURS + " (NumPy)"


def growth(contender: str, case: Case, direction: str, threads: int) -> int | None:
    """The growth of a process in bytes; None if the system does not report it.

    "backward" is for torch only, and measured without the forward pass, which runs before.
    """
    job = {"contender": contender, "case": asdict(case), "direction": direction, "threads": threads}
    command = [sys.executable, "-m", "flashtile.lab.bench.memory", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"memory of {contender}: {done.stderr.strip()}")
    grown: int | None = json.loads(done.stdout)
    return grown


def measure(call: Call) -> int | None:
    """The growth of this process's peak resident memory while the call runs (Linux)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # return free memory, so that the call cannot reuse it
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current resident memory
        before = _status("VmRSS")
        result = call()
        after = _status("VmHWM")
    except (OSError, AttributeError):  # no Linux, or no glibc
        return None
    del result
    return after - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field}")


IN_NUMPY = {OURS_NUMPY: workload.ours_numpy, workload.NAIVE_NUMPY: workload.naive_numpy}


def _prepared(contender: str, case: Case, direction: str, threads: int) -> Call:
    """Prepare the call to be measured, after all one-time initialisation."""
    if contender in workload.IN_TORCH:
        workload.set_threads(threads)
    make = (workload.IN_TORCH | IN_NUMPY)[contender]
    if direction == BACKWARD:
        case = replace(case, direction=TRAINING)
    small = workload.Workload(replace(case, n_q=64, n_k=64), threads)
    small_out = make(small)()  # libraries loaded, threads started
    work = workload.Workload(case, threads)
    forward = make(work)
    if direction == FORWARD:
        return forward
    workload.gradients(small, small_out)
    out = forward()
    return lambda: workload.gradients(work, out)


def main(arguments: list[str]) -> None:
    job: dict[str, Any] = json.loads(arguments[0])
    case = Case(**job["case"])
    print(json.dumps(measure(_prepared(job["contender"], case, job["direction"], job["threads"]))))


if __name__ == "__main__":
    main(sys.argv[1:])
