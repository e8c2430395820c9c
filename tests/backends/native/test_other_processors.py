"""The C++ core for ARM, run by an emulator: a compact grid against the oracle."""

from __future__ import annotations

import shutil

import pytest

from tests.backends.native.emulated import build, emulated
from tests.backends.native.sanitized import cases
from tests.runners import public
from tests.test_agreement import agree

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason=f"{COMPILER} and {EMULATOR} are not both here; Debian's g++-aarch64-linux-gnu and qemu-user have them",
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(COMPILER, tmp_path_factory.mktemp("arm")))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_grid(program: str, threads: int) -> None:
    with emulated([EMULATOR, program], "aarch64"):
        for case in cases():
            agree(case, public("native", threads=threads))
