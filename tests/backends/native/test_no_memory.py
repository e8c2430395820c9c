"""Out of memory in the native core: a MemoryError, unchanged signal masks, and the next call works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.native.core import needs_native
from tests.backends.native.test_threads import python

pytestmark = [needs_native, pytest.mark.skipif(sys.platform != "linux", reason="preloads an allocator")]

ALLOCATOR = """
#include <cstdlib>
#include <new>
extern "C" {
bool exhausted = false;
}
void* operator new(std::size_t n) {
  void* found = exhausted ? nullptr : std::malloc(n);
  return found ? found : throw std::bad_alloc();
}
void operator delete(void* x) noexcept { std::free(x); }
void operator delete(void* x, std::size_t) noexcept { std::free(x); }
"""

CALL = """
import ctypes, signal
import numpy as np
from flashtile.backends import native
from flashtile.host.arrays import NUMPY
from flashtile.problem import describe

exhausted = ctypes.c_bool.in_dll(ctypes.CDLL("{allocator}"), "exhausted")
x = np.random.default_rng(0).standard_normal((1, 4, 200, 32)).astype(np.float32)
few, more = (describe(x, x, x, threads=n) for n in (2, 3))
runners = {{id(p): native.prepare(p, NUMPY) for p in (few, more)}}
run, inputs = runners[id(few)]
out, lse = run.forward(inputs)


def call(problem):
    run, inputs = runners[id(problem)]
    return run.{call}


before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
exhausted.value = True
try:
    call(more)
except MemoryError as error:
    print(error)
exhausted.value = False
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
assert all(np.array_equal(a, b) for a, b in zip(call(more)[:2], call(few)[:2]))
"""


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("allocator")
    source, target = folder / "allocator.cpp", folder / "allocator.so"
    source.write_text(ALLOCATOR)
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", target], check=True)
    return target


@pytest.mark.parametrize(
    "call",
    [
        "forward(inputs)",  # no memory for another worker
        "backward(inputs, x, out, lse, None)",
    ],
    ids=["forward", "backward"],
)
def test_no_memory(allocator: Path, call: str) -> None:
    found = python(CALL.format(allocator=allocator, call=call), LD_PRELOAD=str(allocator))
    assert found == "native core: out of memory"
