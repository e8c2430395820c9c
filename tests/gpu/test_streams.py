"""Calls do not wait and read nothing back; many at once, on streams or from threads, give the same results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import flashtile as ft
from tests.gpu.runner import DIFFERENTIABLE, Given, each_backend
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.gpu.synchronization import no_waiting
from tests.pytorch.samples import run
from tests.support.grid import OPTIONS, Case, build

pytestmark = [pytest.mark.gpu, *each_backend]

Work = Callable[[Given], tuple[Tensor, ...]]
VARIED = [
    *(Case(size, "bfloat16", (option,)) for size in (LONG, DECODE, PACKED) for option in ("causal", "kv_lengths")),
    Case(LONG, "bfloat16", ("everything",)),
    *(Case(size, "bfloat16", ("spans",)) for size in (LONG, PACKED)),
    Case(RAGGED, "bfloat16", ("causal",)),
    Case(RAGGED, "float32", ("causal",)),
    Case(DECODE, "float32", ("causal",)),
]


def test_waiting_is_noticed() -> None:
    x = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


@pytest.mark.parametrize("option", OPTIONS)
def test_nothing_is_read_back(option: str) -> None:
    """Forward and backward; kv_lengths, cu_q and cu_k stay on the device."""
    sizes = [LONG, DECODE, *([PACKED] if option in ("causal", "kv_lengths", "everything", "spans") else [])]
    for size in sizes:
        given = Given(build(Case(size, "bfloat16", (option,))), "cuda")
        with no_waiting():
            given.forward()
            if size is not DECODE:
                given.step()


def test_calls_return_before_the_gpu_is_done() -> None:
    """Behind a kernel that takes seconds, calls of all kinds return at once."""
    calls = [Given(build(case), "cuda") for case in VARIED]
    warm = [given.step() for given in calls]  # compiles kernels, and allocates memory for all calls
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


def test_threads_on_one_stream_recompute_rows_of_their_own() -> None:
    """Spoiled tiles are flagged for a later launch; launches of other threads may come between."""
    rng = torch.Generator("cuda").manual_seed(0)
    calls = []
    for n in range(8):
        q, k, v = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, generator=rng) for _ in range(3))
        v[:, n, 100 * n + 90] = torch.nan  # earlier rows do not see it
        calls.append((q, k, v if n % 2 else v.nan_to_num()))
    alone = [ft.attention(*call, causal=True) for call in calls]
    for n, out in enumerate(alone):
        assert bool(out.isnan().any()) == bool(n % 2) and out[:, n, : 100 * n + 90].isfinite().all()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(calls)) as pool:
        results = pool.map(lambda call: [ft.attention(*call, causal=True) for _ in range(50)], calls)
    for each, wanted in zip(results, alone, strict=True):
        for found in each:
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("case", "work"),
    [(Case(DECODE, "bfloat16", ("causal",)), Given.forward), *((case, Given.step) for case in VARIED)],
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_memory_freed_on_another_stream_is_not_taken_early(case: Case, work: Work) -> None:
    """Another stream reads results of one stream, which are freed before; each stream has its own scratch memory."""
    given = Given(build(case), "cuda")
    alone = work(given)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        with torch.cuda.stream(first):
            once = work(given)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            twice = work(given)
            results += [tuple(x.clone() for x in once), twice]
        for x in once:
            x.record_stream(second)
        del once
    torch.cuda.synchronize()
    for n, found in enumerate(results):
        assert given.alike(found, alone), f"number {n}"


def test_gradients_asked_for_on_another_stream() -> None:
    """Autograd runs on the stream of the forward pass, and the requesting stream waits for it."""
    calls = [Given(build(case), "cuda") for case in VARIED]
    alone = [given.step() for given in calls]
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    for n in [*range(len(calls))] * 8:
        leaves = {name: x.detach().requires_grad_() for name, x in calls[n].leaves.items()}
        inputs = {DIFFERENTIABLE[name]: x for name, x in leaves.items()}
        with torch.cuda.stream(first):
            forward = run(**(calls[n].arguments | inputs))
        second.wait_stream(first)
        with torch.cuda.stream(second):
            found = torch.autograd.grad(forward, tuple(leaves.values()), (calls[n].dout, calls[n].dlse))
            results.append((n, tuple(x.detach().clone() for x in (*forward, *found))))
        for x in (*forward, *found):
            x.record_stream(second)
        del forward, found
    torch.cuda.synchronize()
    for n, copies in results:
        assert calls[n].alike(copies, alone[n]), str(VARIED[n])
