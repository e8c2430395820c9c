"""8-bit tensors on Hopper, multiplied directly: values, edges of tiles, factors, and hidden numbers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

import flashtile as ft
from flashtile.pytorch.eight_bits import DTYPE
from tests.gpu.runner import by_each
from tests.support.eight_bits import EightBitCall

pytestmark = [pytest.mark.gpu, *by_each("gluon")]
each_dim = pytest.mark.parametrize("dim", [64, 128, 256])
LENGTHS = ((1, 1), (64, 64), (65, 129), (127, 128), (200, 333), (385, 385), (513, 257), (1, 700), (300, 1024))
EACH = torch.tensor([[0.5, 2.0], [1.25, 0.0625]])


def check(call: EightBitCall) -> None:
    call.check("cuda", backend="gluon")


@each_dim
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths(causal: bool, dim: int) -> None:
    for n_q, n_k in LENGTHS:
        check(EightBitCall.draw((2, 2, n_q, dim), (2, 2, n_k, dim), causal=causal))


@each_dim
@pytest.mark.parametrize(
    "options",
    [
        {"descale": (0.5, 3.0, 0.01)},
        {"descale": (EACH, 2 * EACH, 3 * EACH), "causal": True},
        {"descale": (torch.tensor(0.75), EACH, 1.0), "window": (100, 30)},
        {"descale": (8.0, 4.0, 1000.0), "causal": True},
        {"descale": (2.0**-20, 2.0**-20, 2.0**-20)},
        {"descale": (0.0, 1.0, 1.0), "causal": True},
        {"descale": (1.0, -1.0, -3.0), "causal": True},
        {"out_dtype": torch.float16},
        {"out_dtype": torch.float32, "descale": (EACH, EACH, EACH)},
        {"softcap": 5.0, "sink": torch.arange(8.0), "descale": (EACH, 1.0, 1.0)},
        {"alibi": torch.rand(8), "causal": True, "descale": (EACH, EACH, EACH)},
        {"kv_lengths": torch.tensor([300, 7])},
        {"scale": 0.3, "window": (5, None)},
    ],
    ids=lambda options: "+".join(options),
)
def test_options(options: dict[str, Any], dim: int) -> None:
    """Four query heads share a key head; with few queries they share rows too."""
    check(EightBitCall.draw((2, 8, 257, dim), (2, 2, 300, dim), **options))
    check(EightBitCall.draw((2, 8, 5, dim), (2, 2, 300, dim), **options))


def test_widths() -> None:
    for dim, dim_v in ((16, 16), (48, 80), (96, 32), (192, 128), (64, 256)):
        check(EightBitCall.draw((1, 2, 200, dim), (1, 1, 300, dim), dim_v, causal=True))


@each_dim
def test_large_scores_and_one_that_outgrows_all(dim: int) -> None:
    """The maximum grows from tile to tile, even by far more than weights may."""
    call = EightBitCall.draw((1, 1, 128, dim), (1, 1, 1024, dim), descale=(4.0, 1.0, 1.0))
    check(call)
    k = call.k.float()
    k[:, :, 300] *= 8
    k[:, :, 5] *= 40
    check(EightBitCall(call.q, k.to(DTYPE), call.v, call.options))


@each_dim
def test_zeros(dim: int) -> None:
    """All weights are equal, and the mean of values is exact in few bits."""
    q = torch.zeros(1, 2, 130, dim, device="cuda").to(DTYPE)
    out, lse = ft.attention(q, q, torch.ones_like(q.float()).to(DTYPE), return_lse=True, backend="gluon")
    assert torch.equal(out, torch.ones_like(out))
    torch.testing.assert_close(lse, torch.full_like(lse, 130.0).log())


@each_dim
@pytest.mark.parametrize("options", [{"causal": True}, {"kv_lengths": torch.tensor([70, 211])}], ids=["band", "length"])
def test_a_nan_that_nobody_may_see(options: dict[str, Any], dim: int) -> None:
    """Rows that see it have NaN, all others are unchanged."""
    call = EightBitCall.draw((2, 2, 260, dim), (2, 2, 260, dim), descale=(EACH, EACH, EACH), **options)
    before, _ = call.run("cuda", backend="gluon")
    k, v = call.k.float(), call.v.float()
    k[:, :, 215] = v[:, :, 211, 3] = v[:, :, 220] = torch.nan
    after, _ = EightBitCall(call.q, k.to(DTYPE), v.to(DTYPE), call.options).run("cuda", backend="gluon")
    first = 211 if "causal" in options else 260
    _, _, of_v = call.values()
    torch.testing.assert_close(after[:, :, :first], before[:, :, :first], rtol=0, atol=0.1 * float(abs(of_v).max()))
    assert not after[:, :, :first].isnan().any()
    assert after[:, :, first:, 3].isnan().all() and after[:, :, max(first, 220) :].isnan().all()


@each_dim
def test_layouts(dim: int) -> None:
    """Heads between rows, as in many models."""
    call = EightBitCall.draw((2, 4, 200, dim), (2, 2, 200, dim))
    plain, _ = call.run("cuda", backend="gluon")
    q, k, v = (x.cuda().transpose(1, 2).contiguous().transpose(1, 2) for x in (call.q, call.k, call.v))
    assert torch.equal(ft.attention(q, k, v, backend="gluon").cpu(), plain)


def test_chosen_by_itself_and_refused_in_words() -> None:
    call = EightBitCall.draw((4, 8, 256, 128), (4, 8, 256, 128))
    q, k, v = (x.cuda() for x in (call.q, call.k, call.v))
    assert torch.equal(ft.attention(q, k, v, backend="auto"), ft.attention(q, k, v, backend="gluon"))
    starts = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(ft.UnsupportedError, match="no packed sequences of float8_e4m3fn"):
        ft.attention_packed(*packed, starts, starts, backend="gluon")
    assert ft.attention_packed(*packed, starts, starts, backend="auto").isfinite().all()


@pytest.mark.parametrize("options", [{}, {"causal": True, "descale": (EACH, EACH, EACH)}], ids=["plain", "factors"])
def test_widened_for_the_portable_kernels(options: dict[str, Any]) -> None:
    EightBitCall.draw((2, 4, 200, 40), (2, 2, 300, 40), **options).check("cuda", backend="triton")
