"""Compare the GPU code of every kernel between this tree and a commit: python -m tests.tools.ptx COMMIT [--slow].

The cases are those of the cross-compilation gates (tests/backends/*/test_targets.py). Each tree compiles its own
kernels for the cases of this tree, in a separate process. Kernel names, comments and line information are ignored:
a change of names or comments must change nothing else. Prints a line for each kernel that differs, and a summary;
exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from tarfile import TarFile
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.backends.gluon import test_targets as gluon
from tests.backends.triton import test_targets as triton
from tests.tools.tree import ROOT

HOPPER = "gluon"  # the name of the Gluon cases among the targets
CACHE = ROOT / "build" / "ptx-cache"  # not the cache of the gates: its kernels have no machine code
# Runs in the root of a tree, with its sources on the path. Both trees must have the names that it uses.
DRIVER = """
import json, sys
import triton
from triton.compiler import compiler
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.amd.compiler import HIPBackend
CUDABackend.make_cubin = lambda *_, **__: b"none"
HIPBackend.make_hsaco = staticmethod(lambda *_, **__: b"none")
compile_it, found, rows = compiler.compile, [], json.load(sys.stdin)
def recording(src, *args, **options):
    made = compile_it(src, *args, **options)
    asm = made.asm
    found.append((src.name, asm["ptx"] if "ptx" in asm else asm["amdgcn"]))
    return made
triton.compiler.compile = compiler.compile = recording
def report(n):
    for name, code in found:
        print(json.dumps([n, name, code]), flush=True)
    found.clear()
if sys.argv[1] == "gluon":
    from tests.backends.gluon import offline
    triton.runtime.driver.set_active(offline.Phantom(offline.TARGETS["sm_90"]))
    for n, row in enumerate(rows):
        offline.start_call(offline.Case(*row))
        report(n)
else:
    from tests.backends.triton import offline
    offline._built = lambda *_, **__: None
    def cases():
        for n, row in enumerate(rows):
            yield offline.Case(*row)
            report(n)
    for _ in offline.build_here(sys.argv[1], cases()):
        pass
"""


class Kernel(NamedTuple):
    """A kernel that a case compiled; kernels that an earlier case compiled are not repeated."""

    case: Any
    name: str
    code: str


def cases_of(slow: bool) -> dict[str, list[Any]]:
    """Return the cases of the gates by target."""
    found: dict[str, list[Any]] = {name: list(rows) for name, rows in triton.QUICK.items()}
    found["sm_90"] += triton.SHORT
    found[HOPPER] = [case for group in gluon.QUICK.values() for case in group]
    if slow:
        for name in triton.QUICK:
            found[name] += triton.FULL
        found[HOPPER] += [*gluon.FULL, *(gluon.Case(dim, "causal", dim_v=dim_v) for dim, dim_v in gluon.WIDTHS)]
    return found


def compiled(root: Path, target: str, cases: list[Any]) -> list[Kernel]:
    """Return the kernels of these cases, compiled by the tree at `root`."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(CACHE), "TRITON_DISABLE_LINE_INFO": "1", "PYTHONPATH": f"{root / 'src'}:{root}"}
    command, sent = [sys.executable, "-c", DRIVER, target], json.dumps(cases)
    done = subprocess.run(command, input=sent, env=env, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{root}: {target}: {done.stderr[-4000:]}")
    lines = map(json.loads, done.stdout.splitlines())
    return [Kernel(cases[n], name, normalized(code, name)) for n, name, code in lines]


def normalized(code: str, name: str) -> str:
    """Return the code without comments, line information and the name of its kernel."""
    code = re.sub(rf"\b{re.escape(name)}(?=\b|_param_|_begin|_end)", "KERNEL", code)
    code = re.sub(r"//.*|/\*.*?\*/", "", code)
    code = re.sub(r"\s;\s.*", "", code) if ".amdgcn_target" in code else code
    lines = (line.rstrip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\s*\.(loc|file|ident)\b", line))


def differences(old: list[Kernel], new: list[Kernel]) -> Iterator[str]:
    """Yield a line for each kernel that differs, with its first lines that do."""
    for before, after in zip(old, new, strict=False):
        names = after.name if before.name == after.name else f"{before.name} -> {after.name}"
        if before.case != after.case:
            yield f"{after.case} {names}: other cases compiled it"
        elif before.code != after.code:
            changed = difflib.unified_diff(before.code.splitlines(), after.code.splitlines(), n=0, lineterm="")
            lines = [line for line in changed if line[:2] not in ("--", "++", "@@")]
            yield f"{after.case} {names}: {len(lines)} lines, {' | '.join(lines[:4])}"
    if len(old) != len(new):
        yield f"{len(old)} kernels there, {len(new)} here"


def compare(commit: str, only: Iterable[str], slow: bool) -> bool:
    """Return whether all kernels have the same code."""
    CACHE.mkdir(parents=True, exist_ok=True)
    total = differing = 0
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        archive = subprocess.run(("git", "archive", commit), cwd=ROOT, check=True, capture_output=True).stdout
        with TarFile(fileobj=BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        for target, cases in cases_of(slow).items():
            if only and target not in only:
                continue
            old, new = pool.map(lambda root, at=target, all_=cases: compiled(root, at, all_), (Path(folder), ROOT))
            lines = [*differences(old, new)]
            for line in lines:
                print(f"{target} {line}", flush=True)
            print(f"{target}: {len(cases)} cases, {len(new)} kernels, {len(lines)} differ", flush=True)
            total, differing = total + len(new), differing + len(lines)
    print(f"{total} kernels compared with {commit}, {differing} differ")
    return not differing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", metavar="COMMIT")
    parser.add_argument("--slow", action="store_true", help="the cases of the slow gates too")
    parser.add_argument("--only", action="append", default=[], metavar="TARGET")
    arguments = parser.parse_args()
    sys.exit(not compare(arguments.commit, arguments.only, arguments.slow))
