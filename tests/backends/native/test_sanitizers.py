"""The C++ core under AddressSanitizer, UBSan and ThreadSanitizer: part of the grid, fuzzing, concurrent callers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashtile.backends.native import library
from tests.backends.native import sanitized

ROOT = Path(__file__).parents[3]
CORE = ROOT / "src/flashtile/backends/native/core"
FLAGS = "-std=c++17 -O1 -g -fPIC -shared -fno-omit-frame-pointer -ffp-contract=fast -fno-math-errno -fno-trapping-math"
ISAS = library.candidates()

pytestmark = pytest.mark.sanitize


def library_of(compiler: str, name: str) -> str:
    return subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


def build(sanitizers: str, isas: list[str]) -> Iterator[Path]:
    """Build a folder with a core for each instruction set."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    needed = "libtsan.so" if sanitizers == "thread" else "libasan.so"
    if compiler is None or not os.path.isabs(library_of(compiler, needed)):
        pytest.skip(f"no g++ with {needed}")
    folder = Path(tempfile.mkdtemp(prefix="flashtile-sanitized-"))
    sources = [str(p) for p in sorted(CORE.glob("*.cpp"))]
    compilers = []
    for isa in isas:
        target = folder / isa / f"libflashtile-{isa}.so"
        target.parent.mkdir()
        flags = [
            *FLAGS.split(),
            f"-fsanitize={sanitizers}",
            "-fno-sanitize-recover=all",
            *sanitized.flags(isa),
            f'-DFT_ISA="{isa}"',
        ]
        command = [compiler, *flags, *sources, "-o", str(target), "-lpthread", "-ldl"]
        compilers.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    errors = [run.communicate()[1] for run in compilers]
    assert not any(run.returncode for run in compilers), "\n".join(errors)[-4000:]
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def with_asan() -> Iterator[Path]:
    yield from build("address,undefined", ISAS)


@pytest.fixture(scope="module")
def with_tsan() -> Iterator[Path]:
    yield from build("thread", ISAS[:1])


def run(folder: Path, preload: tuple[str, ...], module: str, *arguments: str, **more: str) -> str:
    """Run a module on a core of this folder and return what it prints."""
    compiler = os.environ.get("CXX") or "g++"
    environment = os.environ | {
        "LD_PRELOAD": " ".join(library_of(compiler, name) for name in preload),
        # Python itself leaks. Fresh memory is filled with 0xff, which is NaN in every dtype.
        "ASAN_OPTIONS": "detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=255",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
        "FLASHTILE_NATIVE_DIR": str(folder),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | more, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "runtime error" not in done.stderr and "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[-6000:]
    return done.stdout


# With one thread, all builds take the same path, so one is enough.
@pytest.mark.parametrize(("isa", "threads"), [*((isa, "3") for isa in ISAS), (ISAS[0], "1")])
def test_the_grid(with_asan: Path, isa: str, threads: str) -> None:
    assert "cases" in run(with_asan / isa, ("libasan.so", "libubsan.so"), "tests.backends.native.sanitized", threads)


@pytest.mark.parametrize("isa", ISAS)
def test_random_problems(with_asan: Path, isa: str) -> None:
    """New ones each time, for FLASHTILE_FUZZ_MINUTES."""
    minutes, first = os.environ.get("FLASHTILE_FUZZ_MINUTES", "2"), str(int(time.time()) * 1000)
    assert "problems" in run(with_asan / isa, ("libasan.so", "libubsan.so"), "tests.fuzz", minutes, first)


def test_many_callers(with_tsan: Path) -> None:
    assert "calls" in run(with_tsan / ISAS[0], ("libtsan.so",), "tests.backends.native.callers")
