"""Which GPUs and which gradients use the Hopper kernels; without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from flashtile import dispatch  # noqa: E402
from flashtile.backends import gluon, gpu  # noqa: E402
from flashtile.backends.gluon import passes  # noqa: E402
from flashtile.backends.gluon.backward import Backward  # noqa: E402
from flashtile.backends.triton import backward as of_portable  # noqa: E402
from flashtile.problem import describe  # noqa: E402

HOPPER, OTHER = (9, 0), (8, 9)
SEEN = ("shape", "stride", "numel", "element_size", "data_ptr")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to have GPUs of these capabilities."""

    def have(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(gpu, "missing", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n: capabilities[getattr(n, "index", n)])
        gluon.missing.cache_clear()

    yield have
    gluon.missing.cache_clear()


def test_one_hopper_gpu_is_enough(gpus: Any) -> None:
    gpus(OTHER, HOPPER)
    assert gluon.missing() is None


def test_other_gpus_are_not(gpus: Any) -> None:
    gpus(OTHER, (10, 0))
    assert "this one has 8.9" in gluon.missing()


@pytest.mark.parametrize(
    ("release", "known"),
    [("3.5.1", False), ("3.6.0", True), ("3.6.1+cu132", True), ("3.60.0", False), ("3.9.0", False)],
)
def test_releases_of_triton(gpus: Any, monkeypatch: pytest.MonkeyPatch, release: str, known: bool) -> None:
    """Gluon differs in each; with an untested one, calls go to the portable kernels."""
    monkeypatch.setattr(triton, "__version__", release)
    gpus(HOPPER)
    assert gluon.missing() == (None if known else f"it has been tested with Triton 3.6, and this is {release}")


@pytest.mark.parametrize(("index", "can"), [(0, False), (1, True)])
def test_the_gpu_of_the_tensors_counts(gpus: Any, index: int, can: bool) -> None:
    gpus(OTHER, HOPPER)
    x = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16)
    problem = describe(x, x, x)
    there = SimpleNamespace(device=torch.device("cuda", index), **{name: getattr(x, name) for name in SEEN})
    assert (gluon.why_not(replace(problem, q=there)) is None) == can


def test_a_softcap_that_leaves_no_bits_for_scores() -> None:
    x = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16)
    assert gluon.why_not(describe(x, x, x, softcap=50.0)) is None
    assert "softcap" in str(gluon.why_not(describe(x, x, x, softcap=1e5)))


@pytest.mark.parametrize(("dim", "kind"), [(64, Backward), (20, of_portable.Backward)])
def test_gradients_that_are_left_to_the_portable_kernels(dim: int, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy engine cannot fetch rows of 20 columns, even from a copy."""
    monkeypatch.setattr(passes, "Forward", lambda *_: None)
    x = torch.empty(1, 2, 128, dim, dtype=torch.bfloat16)
    run, _ = dispatch.named("gluon").prepare(describe(x, x, x))
    way_back, _ = run.backward.__self__._backward_for((x, x, torch.empty(1, 2, 128), None), False, None)
    assert type(way_back) is kind


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((8, 8, 128, 64), False),  # a tile of 64 rows for each of 128 processors: one wave of the portable kernel
        ((1, 8, 1024, 64), False),
        ((1, 4, 2048, 64), True),  # many keys
        ((9, 8, 128, 64), True),
        ((8, 8, 128, 128), True),
        ((7, 8, 128, 128), False),
        ((512, 8, 64, 128), False),  # few queries
    ],
    ids=str,
)
def test_what_is_enough_to_do(shape: tuple[int, ...], fits: bool) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    assert gluon.suits(describe(x, x, x)) is fits
