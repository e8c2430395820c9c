"""NVIDIA's profiler ncu: what it counted of every kernel that a Python module launched while it asked to be watched."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")  # where it is when it is on no path
MARK = "spin_kernel"  # what torch.cuda._sleep launches, and nothing else does


class ProfilerError(Exception):
    """It is here and gave no counts."""


@dataclass(frozen=True)
class Kernel:
    """One launch, and its metrics by name."""

    name: str
    counts: dict[str, float]


def find() -> str | None:
    """Where it is; None where it is not."""
    return shutil.which("ncu") or next((place for place in PLACES if os.access(place, os.X_OK)), None)


def profile(program: str, module: str, metrics: Sequence[str]) -> tuple[list[Kernel], str]:
    """Run a module under it: the kernels between torch.cuda.profiler.start() and stop(), and what the module printed.

    Each kernel runs as often as it takes to count everything, its caches cold every time.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [program, "--csv", "--log-file", str(log), "--print-units", "base", "--profile-from-start", "off"]
        command += ["--metrics", ",".join(metrics), sys.executable, "-m", module]
        # What can be imported here can be imported there; numbers are written with a point.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        text = log.read_text() if log.exists() else ""
    found = parse(text)
    if done.returncode or not found:
        said = [line for line in (text + done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("==ERROR==")] or said[-3:]
        raise ProfilerError(" ".join(errors) or "it watched no kernel")
    return found, done.stdout


def parse(text: str) -> list[Kernel]:
    """Its table, in the order of the launches: a line a kernel and metric, with lines of its own talk around them."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[str, Kernel] = {}
    for row in csv.DictReader(lines):
        kernel = found.setdefault(row["ID"], Kernel(row["Kernel Name"], {}))
        value = row["Metric Value"].replace(",", "")
        try:
            kernel.counts[row["Metric Name"]] = float(value)
        except ValueError:  # n/a: this chip does not count it
            continue
    return list(found.values())


def by_mark(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """The kernels after each mark."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if MARK in kernel.name:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups
