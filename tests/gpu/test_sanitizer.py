"""Under NVIDIA's compute-sanitizer: no access outside an allocation, no race in shared memory, no missing barrier."""

from __future__ import annotations

import re
import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.gpu.child import python
from tests.gpu.runner import BACKENDS

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def errors(tool: str, what: str) -> tuple[int, str]:
    """The number of errors that the tool found, and its output. Without torch's cache every tensor is an allocation."""
    checker = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if checker is None:
        pytest.skip("there is no compute-sanitizer")
    more = ("--report-api-errors", "no") if tool == "memcheck" else ()  # torch makes calls that may fail
    before = (checker, "--tool", tool, "--target-processes", "application-only", *more)
    run = python("-m", "tests.gpu.sanitized", what, before=before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    told = run.stdout + run.stderr
    if "not supported" in told:
        pytest.skip("compute-sanitizer does not know this device")
    found = SUMMARY.findall(told)
    assert found, told[-4000:]
    return int(found[-1]), told


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_calls(tool: str, backend: str) -> None:
    if backend == "gluon" and tool != "memcheck" and errors(tool, "handshake")[0]:
        pytest.skip(f"{tool} does not understand named barriers of warps that go their own ways")
    count, told = errors(tool, backend)
    assert count == 0, told[:6000]
    run = re.search(r"(\d+) calls", told)
    assert run and int(run[1]) >= 10, told[-4000:]


def test_an_overrun_is_noticed() -> None:
    count, told = errors("memcheck", "overrun")
    assert count > 0 and "Invalid __global__ write" in told
