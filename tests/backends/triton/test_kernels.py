"""Every option through the Triton kernels, against the oracle: interpreted here, for real with -m gpu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.backends.triton import tuning, why_not
from flashtile.band import Band, Cuts, cuts
from tests.backends.triton import kernels
from tests.support import finite_differences
from tests.support.grid import COMBINATIONS, OPTIONS, Case, Size, build, check_backward, check_forward, truth
from tests.support.runners import Runner

torch = pytest.importorskip("torch")
# The interpreter uses NumPy: it warns about the log of 0, products with NaN, and its own deprecations.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
SMALL = Size(2, 4, 2, 19, 37, 16, 24)
PACKED = Size.packed(2, 1, 16, 16, (5, 9), (0, 4), (17, 0), (20, 33))
CASES = [
    *(Case(SMALL, "float32", (name,)) for name in OPTIONS),
    *(Case(SMALL, "float32", names) for names in COMBINATIONS),
    *(Case(PACKED, "float32", (name,)) for name in ("plain", "causal", "kv_lengths", "everything")),
    *(Case(SMALL, dtype, (name,)) for dtype in ("float16", "bfloat16") for name in ("causal", "everything")),
    Case(SMALL, "float64", ("everything",)),
    Case(Size(1, 4, 1, 1, 90, 33, 16), "float32", ("sink",)),
    Case(Size(1, 2, 2, 3, 5, 80, 1), "float32", ("causal",)),
]
LARGE = (
    Size(1, 2, 2, 1, 300, 64, 64),
    Size(2, 4, 1, 65, 129, 128, 128),
    Size(1, 2, 1, 300, 257, 96, 64),
    Size(1, 2, 2, 63, 64, 256, 256),
    Size(1, 1, 1, 40, 70, 512, 512),
    Size(1, 8, 1, 4, 1000, 128, 128),
    Size.packed(4, 2, 64, 64, (128, 128), (0, 7), (5, 0), (77, 200)),
)
DTYPES = ("float16", "bfloat16", "float32")
FULL = [Case(size, dtype, (name,)) for size in LARGE for dtype in DTYPES for name in OPTIONS]


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles for interpreted cases, which are small."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(tuning, "choose", lambda *_: tuning.Config(16, 16, 4, 1))


def run(case: Case) -> None:
    call, against = build(case), truth(case)
    if reason := why_not(kernels.problem_of(call)):
        pytest.skip(reason)
    out, lse = kernels.forward(call)
    check_forward(call, against, out, lse)
    check_backward(call, against, kernels.backward(call, out, lse))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gradients_are_slopes(dtype: str) -> None:
    """Not in bfloat16: the interpreter rounds it towards 0, and an error of 0.3 % would show."""
    runner = Runner("triton", kernels.forward, kernels.backward)
    finite_differences.agree(build(Case(SMALL, dtype, ("causal", "bias", "sink", "softcap"))), runner)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agreement(case: Case) -> None:
    run(case)


def test_starts_beyond_the_rows_are_clipped() -> None:
    """Starts on a device are not validated; out of range, they are clipped to the rows."""
    call = build(Case(PACKED, "float32", ("causal",)))
    astray = {"cu_q": np.array([-7, 5, 5, 22, 10**9]), "cu_k": np.array([-(10**9), 9, 13, 13, 1000])}
    wrong = replace(call, packed=astray)
    out, lse = kernels.forward(call)
    for found, right in zip(kernels.forward(wrong), (out, lse), strict=True):
        np.testing.assert_array_equal(found, right)
    for found, right in zip(kernels.backward(wrong, out, lse), kernels.backward(call, out, lse), strict=True):
        assert right is None or np.array_equal(found, right)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=str)
def test_agreement_on_a_gpu(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_cuts_is_the_twin_of_band_py(block: int) -> None:
    from tests.backends.triton.probe import cuts_kernel

    rng = np.random.default_rng(block)
    wide = 1 << 29
    rows = []
    for _ in range(400):
        first = int(rng.integers(0, 12))
        left, right = (wide if rng.random() < 0.3 else int(rng.integers(-6, 9)) for _ in range(2))
        rows.append(
            [left, right, int(rng.integers(-9, 10)), first, first + int(rng.integers(1, 9)), int(rng.integers(0, 25))]
        )
    given = torch.tensor(rows, dtype=torch.int32, device=kernels.DEVICE)
    found = torch.zeros((len(rows), 4), dtype=torch.int32, device=kernels.DEVICE)
    cuts_kernel[(len(rows),)](given, found, BLOCK=block)
    for (left, right, offset, first, last, n_cols), cut in zip(rows, found.tolist(), strict=True):
        wanted = cuts(Band(left, right, offset), first, last, n_cols, block)
        assert list(Cuts(*cut)) == list(wanted), (left, right, offset, first, last, n_cols)


@pytest.mark.parametrize("two_ends", [False, True])
def test_a_walk_visits_each_tile_once(two_ends: bool) -> None:
    from tests.backends.triton.probe import walk_kernel

    rows = [sorted(cut) for cut in np.random.default_rng(0).integers(0, 9, (100, 4)).tolist()]
    if not two_ends:  # none is partial before the full ones
        rows = [[cut[1], *cut[1:]] for cut in rows]
    given = torch.tensor(rows, dtype=torch.int32, device=kernels.DEVICE)
    found = torch.zeros((len(rows), 8, 2), dtype=torch.int32, device=kernels.DEVICE)
    walk_kernel[(len(rows),)](given, found, MOST=8, TWO_ENDS=two_ends)
    for (begin, full_begin, full_end, end), tiles in zip(rows, found.tolist(), strict=True):
        assert tiles == [[begin <= n < end, full_begin <= n < full_end] for n in range(8)]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 5.0}], ids=str)
def test_the_public_call_on_a_gpu(options: dict[str, Any]) -> None:
    """attention() and its gradients on CUDA tensors match the same call on the CPU."""
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, heads, 130, 64, generator=rng, dtype=torch.float32) for heads in (4, 2, 2)]
    results = []
    for device in ("cpu", "cuda"):
        q, k, v = (x.to(device).detach().requires_grad_() for x in inputs)
        out, lse = ft.attention(q, k, v, return_lse=True, **options)
        assert out.device.type == device
        (out.square().sum() + lse.sum()).backward()
        results.append([x.detach().cpu() for x in (out, lse, q.grad, k.grad, v.grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
