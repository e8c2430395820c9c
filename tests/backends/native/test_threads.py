"""Threads of the native core: equal bits for any number, concurrent callers, fork, Ctrl-C, the default number."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from tests.backends.native.core import needs_native
from tests.support.grid import Case, Size, build
from tests.support.runners import api_runner

pytestmark = needs_native

SIZES = (
    Size(2, 4, 2, 300, 257, 64, 64),
    Size(1, 2, 1, 700, 700, 33, 17),
    Size(1, 4, 1, 1, 3000, 64, 64),
    Size(1, 8, 2, 3, 1500, 80, 80),
    Size(1, 1, 1, 40, 2000, 64, 64),
    Size.packed(4, 2, 64, 64, (170, 200), (0, 5), (33, 600), (1, 90)),
)


def all_results(case: Case, **more: Any) -> dict[str, Any]:
    call, runner = build(case), api_runner("native", **more)
    out, lse = runner.forward(call)
    return {"out": out, "lse": lse} | runner.backward(call, out, lse)._asdict()


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name, x in a.items():
        assert (x is None) == (b[name] is None)
        if x is not None:
            assert np.asarray(x).tobytes() == np.asarray(b[name]).tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("option", ["plain", "causal", "bias of keys", "bias one number", "everything"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_same_bits_for_any_number_of_threads(size: Size, option: str, dtype: str) -> None:
    case = Case(size, dtype, (option,))
    one = all_results(case, threads=1, deterministic=True)
    for threads in (2, 7):
        for _ in range(2):
            same_bits(all_results(case, threads=threads, deterministic=True), one)


def test_eight_callers_at_once() -> None:
    cases = [Case(SIZES[n % 5], "float32", (option,)) for n, option in enumerate(("plain", "causal", "everything") * 3)]
    expected = {case: all_results(case) for case in cases}
    failures: list[BaseException] = []
    together = threading.Barrier(8)

    def caller(n: int) -> None:
        try:
            together.wait()
            for m in range(12):
                case = cases[(n + m) % len(cases)]
                same_bits(all_results(case, threads=1 + (n + m) % 4), expected[case])
        except BaseException as failure:
            failures.append(failure)

    callers = [threading.Thread(target=caller, args=(n,), daemon=True) for n in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a caller hangs"
    assert not failures, failures[0]


def _in_child(case: Case, threads: int, results: Any) -> None:
    results.put(
        {name: None if x is None else np.asarray(x).tobytes() for name, x in all_results(case, threads=threads).items()}
    )


def test_after_fork() -> None:
    """A child does not have its parent's threads and must not wait for them."""
    case = Case(SIZES[0], "float32", ("causal",))
    expected = {
        name: None if x is None else np.asarray(x).tobytes() for name, x in all_results(case, threads=4).items()
    }
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test is about forking a process with threads
        children = [context.Process(target=_in_child, args=(case, threads, results)) for threads in (1, 2, 4)]
        for child in children:
            child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    assert found == [expected] * 3
    same_bits(all_results(case, threads=4), all_results(case, threads=1))  # the parent still works


def python(code: str, timeout: float = 120, **environment: str) -> str:
    plain = {name: x for name, x in os.environ.items() if name not in ("FLASHTILE_THREADS", "OMP_NUM_THREADS")}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=plain | {"OPENBLAS_NUM_THREADS": "1"} | environment,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_core_that_is_first_used_in_a_fork() -> None:
    """If torch has started threads before, the child must not wait for those either."""
    pytest.importorskip("torch")
    found = python(
        """
        import multiprocessing as mp, warnings
        import numpy as np, torch, flashtile
        warnings.simplefilter("ignore", DeprecationWarning)
        def child():
            x = np.ones((2, 4, 300, 32), np.float32)
            flashtile.attention(x, x, x, backend="native", threads=2)
        torch.set_num_threads(2)
        torch.nn.functional.gelu(torch.randn(4_000_000))
        process = mp.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        print(process.exitcode)
        process.kill()
        """
    )
    assert found == "0"


def test_a_package_that_is_first_imported_in_a_fork() -> None:
    """Then no fork handler was registered when the process forked."""
    pytest.importorskip("torch")
    found = python(
        """
        import os, warnings
        import torch
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.set_num_threads(2)
        torch.nn.functional.gelu(torch.randn(4_000_000))
        if os.fork() == 0:
            import signal
            signal.alarm(60)
            import numpy as np, flashtile
            x = np.ones((2, 4, 300, 32), np.float32)
            flashtile.attention(x, x, x, backend="native", threads=2)
            os._exit(0)
        print(os.wait()[1])
        """
    )
    assert found == "0"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
@pytest.mark.parametrize("most", [2, 64])
def test_more_threads_than_can_be_started_with_torch(most: int) -> None:
    """OpenMP would end the process, even below its own limit; the core uses as many threads as can be started."""
    pytest.importorskip("torch")
    found = python(
        f"""
        import resource
        import numpy as np, torch, flashtile as ft
        torch.set_num_threads({most})
        x = np.random.default_rng(0).standard_normal((1, 4, 4000, 32)).astype(np.float32)
        expected = ft.attention(x, x, x, threads=1)
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (120 << 20),) * 2)
        print(np.array_equal(ft.attention(x, x, x, threads=64), expected))
        """
    )
    assert found == "True"


def test_in_workers_of_a_data_loader() -> None:
    pytest.importorskip("torch")
    found = python(
        """
        import numpy as np, torch, flashtile as ft
        x = np.random.default_rng(0).standard_normal((1, 4, 300, 32)).astype(np.float32)
        expected = ft.attention(x, x, x, causal=True, backend="native")

        class Data(torch.utils.data.Dataset):
            def __len__(self): return 6
            def __getitem__(self, n): return ft.attention(x, x, x, causal=True, backend="native", threads=1 + n % 3)

        loader = torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=2, multiprocessing_context="fork")
        print(all(np.array_equal(np.asarray(out), expected) for out in loader))
        """
    )
    assert found == "True"


def test_interrupted() -> None:
    """Ctrl-C during a long call: KeyboardInterrupt when it is over, and the next call works."""
    code = """
        import os, signal, threading, time
        import numpy as np, flashtile as ft
        x = np.random.default_rng(0).standard_normal((1, 8, 4096, 64)).astype(np.float32)
        small = x[:, :, :200]
        expected = ft.attention(small, small, small, backend="native")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in the environment of the tests
        threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            for _ in range(200):
                ft.attention(x, x, x, backend="native")
            print("not interrupted")
        except KeyboardInterrupt:
            for _ in range(3):
                assert np.array_equal(ft.attention(small, small, small, backend="native"), expected)
            print("usable")
        """
    assert python(code) == "usable"


COUNT = """
import os, sys, threading, time
{setup}
import numpy as np, flashtile as ft
x = np.random.default_rng(0).standard_normal((1, 8, 1500, 64)).astype(np.float32)
{convert}
before, most, done = len(os.listdir("/proc/self/task")), 0, False
def watch():
    global most
    while not done:
        most = max(most, len(os.listdir("/proc/self/task")))
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
for _ in range(3):
    ft.attention(x, x, x, backend="native" {options})
done = True
watcher.join()
print(most - before)  # the watcher and the helpers of the caller
"""


def helpers(setup: str = "", convert: str = "", options: str = "", **environment: str) -> int:
    return int(python(COUNT.format(setup=setup, convert=convert, options=options), **environment)) - 1


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads in /proc")
class TestNumberOfThreads:
    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_the_argument(self, threads: int) -> None:
        assert helpers(options=f", threads={threads}") == threads - 1

    @pytest.mark.parametrize("threads", [1, 3])
    def test_the_environment(self, threads: int) -> None:
        assert helpers(FLASHTILE_THREADS=str(threads)) == threads - 1

    def test_the_argument_overrides_the_environment(self) -> None:
        assert helpers(options=", threads=2", FLASHTILE_THREADS="4") == 1

    def test_the_cores_of_this_process_otherwise(self) -> None:
        cores = len(os.sched_getaffinity(0))
        assert helpers() == cores - 1

    def test_a_bad_environment_is_not_an_error(self) -> None:
        for value in ("", "many", "0", "-3"):
            assert helpers(FLASHTILE_THREADS=value) >= 0

    @pytest.mark.parametrize("threads", [1, 3])
    def test_torch(self, threads: int) -> None:
        """torch.set_num_threads applies to tensors."""
        pytest.importorskip("torch")
        setup = f"import torch; torch.set_num_threads({threads})"
        assert helpers(setup, "x = torch.from_numpy(x)") == threads - 1


def test_very_many_threads() -> None:
    """More threads than tasks and than cores."""
    case = Case(Size(1, 1, 1, 5, 5, 4, 4), "float32")
    same_bits(all_results(case, threads=1), all_results(case, threads=64))


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory")
@pytest.mark.parametrize("setup", ["", "import torch"], ids=["alone", "with torch"])
def test_more_threads_than_can_be_started(setup: str) -> None:
    if setup:
        pytest.importorskip("torch")
    code = f"""
{setup}
import resource
import numpy as np, flashtile
x = np.random.default_rng(0).standard_normal((64, 64, 16, 8)).astype(np.float32)
expected = flashtile.attention(x, x, x, backend="native", threads=1)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 31),) * 2)
assert (flashtile.attention(x, x, x, backend="native", threads=4000) == expected).all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_isa_is_one_of_the_builds() -> None:
    from flashtile.backends.native import library

    assert library.isa() in ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "aarch64", "generic")
    assert ft.attention(*(np.ones((2, 3), np.float32),) * 3, backend="native").shape == (2, 3)
