"""A call waits for nothing and reads nothing back; many at once, on streams or from threads, are as good as one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

import torch

from tests.gpu.placing import same_bits
from tests.gpu.runner import Given, each_backend
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.grid import OPTIONS, Case, build

pytestmark = [pytest.mark.gpu, *each_backend]

VARIED = [
    *(Case(size, "bfloat16", (option,)) for size in (LONG, DECODE, PACKED) for option in ("causal", "kv_lengths")),
    Case(LONG, "bfloat16", ("everything",)),
    Case(RAGGED, "bfloat16", ("causal",)),
    Case(RAGGED, "float32", ("causal",)),
    Case(DECODE, "float32", ("causal",)),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Operations of torch that wait for the device are errors."""
    torch.cuda.synchronize()
    try:  # which holds the setting too: it is made before the warning is raised
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it may miss some
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_noticed() -> None:
    x = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


@pytest.mark.parametrize("option", OPTIONS)
def test_nothing_is_read_back(option: str) -> None:
    """Forward and backward; kv_lengths, cu_q and cu_k stay on the device."""
    sizes = [LONG, DECODE, *([PACKED] if option in ("causal", "kv_lengths", "everything") else [])]
    for size in sizes:
        given = Given(build(Case(size, "bfloat16", (option,))), "cuda")
        with no_waiting():
            given.forward()
            if size is not DECODE:
                given.step()


def test_calls_return_before_the_gpu_is_done() -> None:
    """Behind a kernel that takes seconds, calls of all kinds come back at once."""
    calls = [Given(build(case), "cuda") for case in VARIED]
    warm = [given.step() for given in calls]  # kernels are compiled, and there is memory for all at once
    torch.cuda.synchronize()
    del warm
    busy = torch.cuda.Event()
    torch.cuda._sleep(8_000_000_000)
    busy.record()
    results = [given.step() for given in calls]
    assert not busy.query(), "a call waited for the GPU"
    torch.cuda.synchronize()
    for given, found in zip(calls, results, strict=True):
        assert given.alike(found, given.step())


def test_many_streams() -> None:
    calls = [Given(build(case), "cuda") for case in VARIED]
    alone = [given.step() for given in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results = []
    for turn in range(8):
        for n in range(len(calls)):
            with torch.cuda.stream(streams[(n + turn) % len(calls)]):
                results.append((n, calls[n].step()))
    torch.cuda.synchronize()
    for n, found in results:
        assert calls[n].alike(found, alone[n]), str(VARIED[n])


def test_many_threads() -> None:
    calls = [Given(build(case), "cuda") for case in VARIED]
    alone = [given.step() for given in calls]
    torch.cuda.synchronize()

    def work(n: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [calls[n].step() for _ in range(8)]
            torch.cuda.current_stream().synchronize()
        return all(calls[n].alike(results, alone[n]) for results in found)

    with ThreadPoolExecutor(len(calls)) as pool:
        right = list(pool.map(work, range(len(calls))))
    assert all(right), [str(case) for case, good in zip(VARIED, right, strict=True) if not good]


def test_memory_freed_on_another_stream_is_not_taken_early() -> None:
    """Results of one stream feed another; scratch memory of either is its own."""
    given = Given(build(Case(DECODE, "bfloat16", ("causal",))), "cuda")
    out, lse = given.forward()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(first):
            once, once_lse = given.forward()
        second.wait_stream(first)
        with torch.cuda.stream(second):
            twice, _ = given.forward()
            difference = (once - twice).abs().sum() + (once_lse - lse).abs().nan_to_num().sum()
        once.record_stream(second)
        once_lse.record_stream(second)
        torch.cuda.current_stream().wait_stream(second)
        assert not difference.item()
        assert same_bits(once, out)
