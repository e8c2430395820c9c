"""The C++ core under AddressSanitizer and UBSan: a compact grid, with fresh memory full of NaN."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flashtile.backends.native import library
from tests.backends.native import sanitized

ROOT = Path(__file__).parents[3]
CORE = ROOT / "src/flashtile/backends/native/core"
FLAGS = (
    "-std=c++17 -O1 -g -fPIC -shared -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all "
    "-ffp-contract=fast -fno-math-errno -fno-trapping-math"
)
ISAS = library.candidates()

pytestmark = pytest.mark.sanitize


def library_of(compiler: str, name: str) -> str:
    return subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def build() -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None or not os.path.isabs(library_of(compiler, "libasan.so")):
        pytest.skip("no g++ with AddressSanitizer")
    folder = Path(tempfile.mkdtemp(prefix="flashtile-asan-"))
    sources = [str(p) for p in sorted(CORE.glob("*.cpp"))]
    compilers = []
    for isa in ISAS:
        target = folder / isa / f"libflashtile-{isa}.so"
        target.parent.mkdir()
        flags = [*FLAGS.split(), *sanitized.flags(isa), f'-DFT_ISA="{isa}"']
        command = [compiler, *flags, *sources, "-o", str(target), "-lpthread", "-ldl"]
        compilers.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    errors = [run.communicate()[1] for run in compilers]
    assert not any(run.returncode for run in compilers), "\n".join(errors)[-4000:]
    yield folder
    shutil.rmtree(folder)


# One thread alone takes the same path in every build.
@pytest.mark.parametrize(("isa", "threads"), [*((isa, "3") for isa in ISAS), (ISAS[0], "1")])
def test_the_grid(build: Path, isa: str, threads: str) -> None:
    compiler = os.environ.get("CXX") or "g++"
    environment = os.environ | {
        "LD_PRELOAD": f"{library_of(compiler, 'libasan.so')} {library_of(compiler, 'libubsan.so')}",
        # Python itself leaks; fresh memory is 0xff, which is NaN in every dtype.
        "ASAN_OPTIONS": "detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=255",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "FLASHTILE_NATIVE_DIR": str(build / isa),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }
    command = [sys.executable, "-m", "tests.backends.native.sanitized", threads]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-6000:]
    assert "runtime error" not in run.stderr and "cases" in run.stdout
