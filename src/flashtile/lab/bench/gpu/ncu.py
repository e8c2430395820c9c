"""NVIDIA's profiler ncu: its counts for every kernel that a Python module launches while profiling is on."""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")  # where to look besides the path
MARK = "spin_kernel"  # launched only by torch.cuda._sleep


class ProfilerError(Exception):
    """The profiler gave no counts."""


@dataclass(frozen=True)
class Kernel:
    """One launch, and its metrics by name."""

    name: str
    counts: dict[str, float]


def find() -> str | None:
    """The path of ncu; None if it is not installed."""
    return shutil.which("ncu") or next((place for place in PLACES if os.access(place, os.X_OK)), None)


def profile(program: str, module: str, metrics: Sequence[str]) -> tuple[list[Kernel], str]:
    """Run a module under ncu; return the kernels between torch.cuda.profiler.start() and stop(), and its output.

    ncu replays each kernel until everything is counted, with cold caches every time.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [program, "--csv", "--log-file", str(log), "--print-units", "base", "--profile-from-start", "off"]
        command += ["--metrics", ",".join(metrics), sys.executable, "-m", module]
        # The module can import what this process can; LC_ALL=C writes numbers with a point.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        text = log.read_text() if log.exists() else ""
    found = parse(text)
    if done.returncode or not found:
        lines = [line for line in (text + done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("==ERROR==")] or lines[-3:]
        raise ProfilerError(" ".join(errors) or "it profiled no kernel")
    return found, done.stdout


def parse(text: str) -> list[Kernel]:
    """Parse its table, in launch order: one line per kernel and metric, among lines of messages."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[str, Kernel] = {}
    for row in csv.DictReader(lines):
        kernel = found.setdefault(row["ID"], Kernel(row["Kernel Name"], {}))
        value = row["Metric Value"].replace(",", "")
        try:
            kernel.counts[row["Metric Name"]] = float(value)
        except ValueError:  # n/a: not counted on this chip
            continue
    return list(found.values())


def by_mark(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Group the kernels after each mark."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if MARK in kernel.name:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups
