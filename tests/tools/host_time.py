"""Measure the host time of a small GPU call with a stub driver, without a GPU: python -m tests.tools.host_time.

It is the time of the Python code and an allocation. To compare two trees, alternate between them on one machine:
PYTHONPATH=src python -m tests.tools.host_time
"""

from __future__ import annotations

import subprocess
import tempfile
import timeit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import flashtile as ft
from flashtile import dispatch
from flashtile.backends.gluon import backward, forward
from flashtile.backends.gluon.work_counters import MAX_FLAGS, WorkCounters
from flashtile.backends.gpu import device as gpu
from flashtile.backends.gpu import kernel_launch, launcher
from flashtile.backends.gpu.kernel_launch import KernelLaunch
from flashtile.pytorch import calls, interception
from tests.backends.gpu.test_kernel_launch import MAPPED, CudaLauncher, Map

SHAPE = (16, 8, 128, 64)  # of the row of `flashtile bench gpu` that the Hopper kernels run
CALLS, ROUNDS = 2000, 15
DRIVER = """
extern "C" int cuLaunchKernelEx(const void*, void*, void**, void**) { return 0; }
extern "C" int cuTensorMapReplaceAddress(void*, void*) { return 0; }
"""


def _kind(x: Any) -> Any:
    """Return the type of an argument as in the signature of Triton's compiled kernel."""
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    if x is None:
        return "constexpr"
    return "*bf16" if hasattr(x, "data_ptr") else "i64" if isinstance(x, int) else MAPPED


def _compile(launch: KernelLaunch, *args: Any) -> None:
    """Replace the first launch of a kernel, which would compile it."""
    kinds = dict(enumerate(map(_kind, launch.kernel_args(args))))
    launch.compiled = SimpleNamespace(
        run=CudaLauncher(),
        packed_metadata=(4, 1, 1000),
        function=77,
        metadata=SimpleNamespace(tensordesc_meta=[{}] * [*kinds.values()].count(MAPPED)),
        src=SimpleNamespace(signature=kinds),
    )


@contextmanager
def stub_driver(backend: str) -> Iterator[None]:
    """Send tensors without memory to this backend, like those of a Hopper GPU, and launch nothing."""
    row = next(row for row in dispatch.TABLE if row.name == backend)
    shared = WorkCounters(torch.empty(2, device="meta"), torch.empty(MAX_FLAGS, device="meta"), None)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream={0: 5}.__getitem__)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "driver.cpp").write_text(DRIVER)
        library = str(folder / "driver.so")
        subprocess.run(["g++", "-shared", "-fPIC", "-o", library, str(folder / "driver.cpp")], check=True)
        launcher._library.cache_clear()
        stack.callback(launcher._library.cache_clear)
        for target, name, value in (
            (launcher, "DRIVER", library),
            (launcher, "_encode", lambda descriptor, _: [Map(), *descriptor.shape, *descriptor.strides]),
            (KernelLaunch, "__call__", _compile),
            (kernel_launch, "INTERPRETED", False),
            (kernel_launch, "driver", SimpleNamespace(active=active)),
            (forward, "acquire_counters", lambda _: shared),
            (backward, "acquire_counters", lambda _: shared),
            (dispatch, "choose", lambda *_: row),
            (gpu, "architecture", lambda _: (9, 0)),
            (gpu, "processors", lambda _: 132),
            (interception, "_PLAIN", -1),
            (calls, "_known", {}),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def host_time(backend: str, **options: Any) -> float:
    """Return the microseconds per call of the fastest round, which other processes disturbed least."""
    q, k, v = (torch.empty(SHAPE, device="meta", dtype=torch.bfloat16) for _ in range(3))
    with stub_driver(backend):
        found = timeit.repeat(lambda: ft.attention(q, k, v, **options), number=CALLS, repeat=ROUNDS)
    return min(found) / CALLS * 1e6


if __name__ == "__main__":
    for name in ("gluon", "triton"):
        print(f"{name:8} {host_time(name):6.2f} us, causal {host_time(name, causal=True):6.2f} us")
