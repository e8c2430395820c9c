"""The C++ core built by Clang, and for ARM in an emulator: part of the grid against the oracle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from flashtile.backends.native import library
from flashtile.numerics.dtypes import FLOATS
from tests.backends.native import test_few_queries as few
from tests.backends.native.emulated import build, emulated
from tests.backends.native.sanitized import cases, flags
from tests.support.runners import api_runner
from tests.test_agreement import agree

HERE = library.candidates()[0]
# Compiler, instruction set, emulator; Debian's packages are clang, g++-aarch64-linux-gnu, qemu-user.
BUILDS = {
    "clang": ("clang++", HERE, []),
    "clang generic": ("clang++", "generic", []),
    "arm": ("aarch64-linux-gnu-g++", "aarch64", ["qemu-aarch64"]),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=BUILDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """While it is active, backend="native" is another build."""
    compiler, isa, emulator = BUILDS[request.param]
    for needed in (compiler, *emulator):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed")
    program = build(compiler, tmp_path_factory.mktemp("other"), isa, flags(isa))
    with emulated([*emulator, str(program)], isa):
        yield


@pytest.mark.parametrize("threads", [1, 3])
def test_the_grid(built: None, threads: int) -> None:
    for case in cases():
        agree(case, api_runner("native", threads=threads))


@pytest.mark.parametrize("dtype", FLOATS)
def test_forward_and_backward_compute_equal_scores(built: None, dtype: str) -> None:
    for size in few.SIZES:
        few.test_a_key_that_takes_it_all_has_weight_one(size, dtype, {})
