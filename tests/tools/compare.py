"""Compare the speed of versions of this package, which take turns in one process.

python -m tests.tools.compare OTHER... --only WORDS: OTHER is a commit, or a folder that holds a package `flashtile`;
the rows are those of `flashtile bench gpu`. Prints its time / the time of the installed package.

With --cpu the cases are those of `flashtile bench cpu` and a small training step, and what is printed is the time of
the installed package / its time. OTHER, a commit, is compiled first.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tarfile import TarFile
from tempfile import TemporaryDirectory
from types import ModuleType

from flashtile.backends.native import library
from flashtile.lab.bench import workload
from flashtile.lab.bench.cases import CPU, PROJECTIONS, TRAINING, Case, Group
from flashtile.lab.bench.gpu import device, peers, rows
from flashtile.lab.bench.gpu.bench import Bench
from flashtile.lab.bench.timing import Call, alternate, geometric_mean
from tests.tools.tree import ROOT

NAME = re.compile(r"\bflashtile\b")


def files_of(other: str) -> dict[str, str]:
    """Return the Python files of a version by their path in the package."""
    folder = Path(other, "flashtile")
    if folder.is_dir():
        return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}
    command = ("git", "archive", f"{other}:src/flashtile")
    with TarFile(fileobj=BytesIO(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)) as archive:
        names = [name for name in archive.getnames() if name.endswith(".py")]
        return {name: file.read().decode() for name in names if (file := archive.extractfile(name))}


def copy_renamed(other: str, name: str, folder: Path) -> None:
    """Copy a version to this folder as a package of another name, which shares nothing with the installed one."""
    for path, text in files_of(other).items():
        place = folder / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(NAME.sub(name, text))


def benchmark_of(name: str, module: str) -> ModuleType:
    """Import a module of a renamed package's benchmark, which was elsewhere before flashtile.lab."""
    bench = "lab.bench" if find_spec(f"{name}.lab") else "bench"
    return import_module(f"{name}.{bench}.{module}")


def peer_of(name: str) -> peers.Peer:
    """Return the renamed package's own peer in the benchmark."""
    found: peers.Peer = benchmark_of(name, "gpu.peers").PEERS[0]
    assert found.name == name
    return found


def compare(others: list[str], only: list[str], rounds: int) -> None:
    with TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        names = {f"flashtile_{n}": other for n, other in enumerate(others)}
        for name, other in names.items():
            copy_renamed(other, name, Path(folder))
        bench = Bench(device.Cuda(), [peers.PEERS[0], *map(peer_of, names)], rounds)
        for row in rows.measurable(rows.select([rows.TRAIN], only, False), bench.device.name)[0]:
            found = bench.measure(row)
            ratios = {other: found["ratios"][name]["value"] for name, other in names.items() if name in found["ratios"]}
            text = " ".join(f"{other} {ratio:.3f}" for other, ratio in ratios.items())
            print(f"{row.name}: {found['times'][peers.OURS]['median_s'] * 1e6:.1f} us; {text}", found["absent"] or "")


SMALL_STEP = Group("small-training", "a small training step", (Case(128, 128, 64, 4, 4, 2, direction=TRAINING),), bar=1)


def build_core(other: str, package: Path) -> None:
    """Build the C++ core of a commit into its renamed package."""
    with TemporaryDirectory() as folder:
        command = ("git", "archive", other)
        with TarFile(fileobj=BytesIO(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)) as tar:
            tar.extractall(folder, filter="data")
        build = f"{folder}/build"
        for command in (
            ("cmake", "-S", folder, "-B", build, f"-DFLASHTILE_ISA={library.candidates()[0]}"),
            ("cmake", "--build", build, "--parallel"),
        ):
            subprocess.run(command, check=True, capture_output=True)
        for core in Path(build).glob("libflashtile-*.so"):
            shutil.copy(core, package / "backends" / "native")


def contender(name: str, group: Group, case: Case, threads: int) -> Call | None:
    """Return a renamed package's call for a case of its own benchmark; None if that has no such case.

    Views of projections are new to it, and made here.
    """
    if case.entry in PROJECTIONS:
        work = workload.Workload(case, threads)
        return workload.step(work, workload.ours(work, import_module(name).attention))
    try:
        module = benchmark_of(name, "workload")
    except ModuleNotFoundError:  # an older version
        module = benchmark_of(name, "peers")
    known = (x for x in benchmark_of(name, "cases").CPU if x.name == group.name or group is SMALL_STEP)
    if group is not SMALL_STEP and all(case.to_dict() != x.to_dict() for found in known for x in found.cases):
        return None
    found: Call = module.contenders(module.Workload(case, threads), ours_alone=True)[module.OURS]
    return found


def compare_on_cpu(others: list[str], only: list[str], seconds: float) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield the group and name of each case, and our time / the time of each other version."""
    if "FLASHTILE_NATIVE_DIR" in os.environ:
        raise SystemExit("FLASHTILE_NATIVE_DIR names one core for all versions: unset it, and install this tree")
    threads = workload.default_threads()
    with TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        names = {other: f"flashtile_{n}" for n, other in enumerate(others)}
        for other, name in names.items():
            copy_renamed(other, name, Path(folder))
            build_core(other, Path(folder, name))
        for group in (*CPU, SMALL_STEP):
            if only and not any(word in group.name for word in only):
                continue
            for case in group.cases:
                calls = {name: contender(name, group, case, threads) for name in ("flashtile", *names.values())}
                able = {name: call for name, call in calls.items() if call is not None}
                times = alternate(able, seconds=seconds, warm_up=3, min_rounds=5, shuffle=random.Random(0))
                ratios = {
                    other: times["flashtile"].median / times[name].median
                    for other, name in names.items()
                    if name in times
                }
                yield group.name, case.name, ratios


def print_cpu(others: list[str], only: list[str], seconds: float) -> None:
    """Print a line for each case, and one for each group with the geometric mean."""
    groups: dict[str, list[dict[str, float]]] = {}
    for group, case, ratios in compare_on_cpu(others, only, seconds):
        groups.setdefault(group, []).append(ratios)
        print(f"{group}: {case}:", *(f"{other} {ratio:.3f}" for other, ratio in ratios.items()), flush=True)
    for group, rows_of in groups.items():
        means = {other: [row[other] for row in rows_of if other in row] for other in others}
        print(f"{group}:", *(f"{other} {geometric_mean(each):.3f}" for other, each in means.items() if each))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="+", metavar="OTHER")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS")
    parser.add_argument("--rounds", type=int, default=11, help="on a GPU")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0, help="for a case on a CPU")
    arguments = parser.parse_args()
    if arguments.cpu:
        print_cpu(arguments.others, arguments.only, arguments.seconds)
    else:
        compare(arguments.others, arguments.only, arguments.rounds)
