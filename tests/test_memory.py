"""Measured memory: the extra arrays of `tiles` do not grow with N, and the native core stays within its limits."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.backends import tiles
from flashtile.problem import describe
from tests.backends.native.core import needs_native

H, D = 1, 16
OPTIONS: dict[str, Any] = {
    "plain": lambda n: {},
    "causal": lambda n: {"causal": True},
    "mask": lambda n: {"mask": np.ones((n, n), bool)},
    "keys": lambda n: {"mask": np.arange(n) % 3 > 0, "softcap": 3.0, "sink": np.zeros(H, np.float32)},
    "bias": lambda n: {"bias": np.zeros((n, n), np.float32)},
    "dropout": lambda n: {"dropout": 0.2, "alibi": np.ones(H, np.float32), "window": (40, 40)},
}


def inputs(n: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, H, n, D)).astype(np.float32) for _ in range(3)]


def peak_of(f: Any) -> tuple[int, int]:
    """Return the peak of what f allocates, beyond its results, and the bytes of its results."""
    f()  # imports and caches
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        results = [x for x in f() if x is not None]
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    returned = sum(x.nbytes for x in results)
    return peak - returned, returned


@pytest.mark.parametrize("order", ["fa1", "fa2"])
@pytest.mark.parametrize("option", OPTIONS)
def test_tiles_forward_needs_tiles_and_row_statistics_only(option: str, order: str) -> None:
    def extra(n: int) -> int:
        problem = describe(*inputs(n), **OPTIONS[option](n))
        return peak_of(lambda: tiles.forward(problem, order, 64, 64))[0]

    small, large = extra(512), extra(2048)
    # A few numbers per row may be added (m, l, and their copies), but no row of scores.
    assert large - small < (2048 - 512) * 4 * 6, f"{small} bytes at 512, {large} at 2048"
    assert large < 2048 * 2048 * 4 / 8


@pytest.mark.parametrize("option", OPTIONS)
def test_tiles_backward_is_linear(option: str) -> None:
    def extra(n: int) -> int:
        problem = describe(*inputs(n), **OPTIONS[option](n))
        out, lse = tiles.forward(problem)
        return peak_of(lambda: tiles.backward(problem, out, out, lse, None, 64, 64))[0]

    small, large = extra(512), extra(2048)
    assert large - small < (2048 - 512) * (D + 6) * 4, f"{small} bytes at 512, {large} at 2048"
    assert large < 2048 * 2048 * 4 / 8


@pytest.mark.parametrize("order", ["fa1", "fa2"])
def test_the_largest_array_of_tiles_does_not_grow(order: str) -> None:
    """Every array in SRAM, after every event of either pass, is at most a tile or a block."""
    br = bc = 32
    for n in (64, 256, 300):
        problem = describe(*inputs(n), causal=True, mask=np.ones((n, n), bool), dropout=0.1)
        sizes: list[int] = []

        def record(event: Any, machine: Any, sizes: list[int] = sizes) -> None:
            sizes.extend(x.size for x in machine.sram.values())

        out, lse = tiles.forward(problem, order, br, bc, record)
        tiles.backward(problem, out, out, lse, None, br, bc, record)
        assert max(sizes) == br * max(bc, D)


def test_probabilities_build_only_the_requested_rows() -> None:
    q, k, _ = inputs(2048)
    extra, returned = peak_of(lambda: [ft.probabilities(q, k, rows=[3, 7])])
    assert returned == 2 * 2048 * 8
    assert extra < 2048 * D * 8 * 2 + 2 * 2048 * 8 * 10, "k in float64, and some rows of scores"


GROWTH = """
import ctypes, json, sys
import numpy as np
import flashtile as ft

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

def growth(f):
    ctypes.CDLL(None).malloc_trim(0)  # free memory is given back, so that f cannot use it unseen
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = status("VmRSS")
    f()
    return status("VmHWM") - before
"""
NATIVE = """
n, heads, dim, options = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
small = [rng.standard_normal((1, heads, 256, dim)).astype(np.float32) for _ in range(3)]
out, lse = ft.attention(*small, return_lse=True, backend="native", **options)
ft.attention_backward(out, *small, out, lse, backend="native", **options)  # starts threads, grows their stacks
q, k, v = (rng.standard_normal((1, heads, n, dim), dtype=np.float32) for _ in range(3))
results = {}
def forward():
    results["out"], results["lse"] = ft.attention(q, k, v, return_lse=True, backend="native", **options)
def backward():
    results["grads"] = ft.attention_backward(results["out"], q, k, v, *results.values(), backend="native", **options)
print(json.dumps([growth(forward), growth(backward)]))
"""


def native_growth(n: int, heads: int = 2, dim: int = 64, **options: Any) -> tuple[float, float]:
    """Return the growth of the process at its peak in a forward and in a backward pass, in MB, with results."""
    forward, backward = grown(NATIVE, n, heads, dim, options)
    return forward, backward


def grown(code: str, *given: Any) -> list[float]:
    """Run code that may call growth() in a new process, with these arguments. Return what it prints, in MB."""
    run = subprocess.run([sys.executable, "-c", GROWTH + code, json.dumps(given)], capture_output=True, text=True)
    if "clear_refs" in run.stderr:
        pytest.skip("the kernel does not let a process reset its peak")
    assert run.returncode == 0, run.stderr
    return [n / 1e6 for n in json.loads(run.stdout)]


@needs_native
def test_native_grows_no_more_than_torch() -> None:
    """N = 16384, 2 heads, D = 64: outputs of 8.4 and 25.2 MB; torch's SDPA grows by 9.8 and 34.7 MiB."""
    forward, backward = native_growth(16384, causal=True)
    assert forward < 9.8 * 1.048576
    assert backward < 34.7 * 1.048576


SPANS = """
kind, n = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
def options(n):
    if kind == "band":
        return {"window": (1024, 0)}
    spans = ft.masks.sink_window(1024, 4, n)
    return {"spans": ft.Spans.of(np.repeat(spans.limits, 2, 1)) if kind == "spans of heads" else spans}
def inputs(n):
    return [rng.standard_normal((1, 2, n, 64), dtype=np.float32) for _ in range(3)]
def both(tensors, options):
    out, lse = ft.attention(*tensors, return_lse=True, backend="native", **options)
    return out, lse, *ft.attention_backward(out, *tensors, out, lse, backend="native", **options)
both(inputs(4096), options(4096))  # starts threads, grows their stacks, loads the code
large, given, results = inputs(n), options(n), []
found = growth(lambda: results.extend(both(large, given)))
print(json.dumps([found - sum(x.nbytes for x in results if x is not None)]))
"""


@needs_native
def test_spans_need_no_more_memory_than_a_band() -> None:
    """A window with sinks beside the window alone, N = 65536, forward and backward. Scores would be 34 GB."""
    band, spans, of_heads = (grown(SPANS, kind, 1 << 16)[0] for kind in ("band", "spans", "spans of heads"))
    assert max(spans, of_heads) <= 1.1 * band


@needs_native
@pytest.mark.parametrize("options", [{}, {"window": [100, 100]}, {"softcap": 2.0, "dropout": 0.1}], ids=str)
def test_native_grows_linearly(options: dict[str, Any]) -> None:
    results = [n * 2 * 64 * 4 / 1e6 for n in (2048, 8192)]
    (f_small, b_small), (f_large, b_large) = (native_growth(n, **options) for n in (2048, 8192))
    # Beyond the results: scratch memory per thread, and a few numbers per row. Scores would be 268 MB per head.
    assert f_large - results[1] < f_small - results[0] + 1.0 and f_large - results[1] < 3
    assert b_large - 3 * results[1] < b_small - 3 * results[0] + 1.0 and b_large - 3 * results[1] < 4


TINY = """
sequences, n_q, heads, packed = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
def made(n, sequences=sequences):
    shape = (sequences * n, heads, 64) if packed else (sequences, heads, n, 64)
    return rng.standard_normal(shape, dtype=np.float32)
def attention(q, k, sequences=sequences):
    if not packed:
        return ft.attention(q, k, k, return_lse=True, backend="native")
    cu_q, cu_k = (np.arange(sequences + 1) * n for n in (n_q, 8))
    return ft.attention_packed(q, k, k, cu_q, cu_k, return_lse=True, backend="native")
attention(made(n_q, 50), made(8, 50), 50)
q, k = made(n_q), made(8)
results = []
print(json.dumps([growth(lambda: results.extend(attention(q, k))), sum(x.nbytes for x in results)]))
"""


@needs_native
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("n_q", "heads"), [(8, 1), (1, 8)])
def test_tens_of_thousands_of_sequences_share_their_scratch(n_q: int, heads: int, packed: bool) -> None:
    """Each thread has its own. One for each sequence had taken 300 MB, for a result of 41 MB."""
    found, results = grown(TINY, 20_000, n_q, heads, packed)
    assert found < results + 5
