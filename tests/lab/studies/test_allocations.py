"""allocations.py: no array escapes tracking, and tracking leaves nothing behind."""

import importlib
import tracemalloc

import numpy as np
import pytest

from flashtile.lab.studies import allocations
from flashtile.lab.studies.allocations import tracked

N = 200
BIG = 8 * N * N
x = np.ones((N, N))
MAKERS = {
    "zeros": lambda: np.zeros((N, N)),
    "empty": lambda: np.empty((N, N)),
    "full": lambda: np.full((N, N), 2.0),
    "copy": x.copy,
    "astype": lambda: np.ones((N, N), np.float32).astype(np.float64),
    "ufunc": lambda: np.exp(x),
    "product": lambda: x[:, :3] @ x[:3],
    "where": lambda: np.where(x > 0, x, 0),
    "outer": lambda: np.outer(x[0], x[0]),
    "broadcast": lambda: x[0][:, None] - x[0],
    "einsum": lambda: np.einsum("i,j->ij", x[0], x[0]),
    "index": lambda: x[np.arange(N)],
    "concatenate": lambda: np.concatenate([x[: N // 2], x[N // 2 :]]),
    "iterator": lambda: np.fromiter((i for i in range(N * N)), np.float64),
    "a temporary": lambda: float((x[0][:, None] * x[0]).sum()),
    "random": lambda: np.random.default_rng(0).standard_normal((N, N)),
    "subclass": lambda: x.view(np.matrix) * 2,
}


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("maker", MAKERS)
def test_allocations_are_tracked(maker):
    with tracked() as seen:
        MAKERS[maker]()
    assert max(seen.sizes) >= BIG
    assert seen.peak >= BIG


def test_small_arrays_count_and_views_do_not():
    with tracked() as seen:
        small = np.zeros(3)
        view = x[3:7].T
    assert seen.sizes == [24] and view.base is not None and small.nbytes == 24


def test_peak_and_live_bytes():
    with tracked() as seen:
        a = np.zeros(1000)
        b = np.zeros(500)
        del a
        c = np.zeros(600)
    assert (seen.sizes, seen.peak, seen.live) == ([8000, 4000, 4800], 12000, 8800)
    assert seen.without(c) == [8000, 4000] and seen.without(b, c) == [8000]


def test_results_must_have_been_tracked():
    with tracked() as seen:
        np.zeros(10)
    with pytest.raises(KeyError):
        seen.without(x)


def test_it_agrees_with_tracemalloc():
    def work():
        total = np.zeros((N, N))
        for _ in range(3):
            total = total + np.exp(x) * 2
        return total

    with tracked() as seen:
        work()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        work()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert seen.peak <= peak < seen.peak + 20_000, "Python's own objects are the difference"


def test_arrays_outlive_tracking_and_are_not_counted_the_next_time():
    with tracked() as first:
        a = np.arange(1000.0)
    assert a.sum() == 499500
    with tracked() as second:
        del a
        np.zeros(10)
    assert second.sizes == [80] and second.live == 0
    assert first.live == 8000, "what is freed later is not its business"
    np.zeros(1000)
    assert len(first.sizes) == 1 and len(second.sizes) == 1


def test_numpy_has_its_own_allocator_back():
    handler = importlib.import_module(allocations.numpy_core() + ".multiarray").get_handler_name
    own = handler()
    with tracked():
        assert handler() == "flashtile_tracker" != own
    assert handler() == own


def test_arrays_that_outlive_tracking_are_freed_without_python():
    """Otherwise an array that lives until exit would call into a finalised interpreter."""
    tracker = allocations._tracker()
    with tracked():
        assert tracker.handler.free != tracker.numpy.free
    for kind in ("malloc", "calloc", "realloc", "free"):
        assert getattr(tracker.handler, kind) == getattr(tracker.numpy, kind)


def test_one_at_a_time_and_off_after_an_error():
    with pytest.raises(RuntimeError, match="already"), tracked(), tracked():
        pass
    with pytest.raises(ZeroDivisionError), tracked():
        1 / 0  # noqa: B018
    with tracked() as seen:
        np.zeros(5)
    assert seen.sizes == [40]
