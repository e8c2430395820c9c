"""Tensors as launches need them: 32-bit offsets reach all rows; copies only if necessary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from flashtile.backends.gpu import tensors
from flashtile.backends.gpu.tensors import DISCARDED, MAX_ROW_STRIDE, Result, laid_out, tidy, tidy_gradients
from flashtile.backends.triton import tuning
from flashtile.problem import describe


def strided(shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, device="meta", dtype=torch.bfloat16)


def test_offsets_within_a_tile_have_32_bits() -> None:
    tables = [*tuning.MEASURED.values(), *tuning.DROPOUT.values(), *tuning.REASONED.values()]
    tiles = [config for table in tables for steps in table.values() for config in steps.values()]
    largest = max(max(tile.block_q, tile.block_k) for tile in tiles)
    assert largest >= 128 and (largest - 1) * (MAX_ROW_STRIDE - 1) + 512 < 1 << 31


@pytest.mark.parametrize(
    ("strides", "stays"),
    [
        ((1 << 40, 1 << 36, 64, 1), True),  # heads and batches may be anywhere
        ((1 << 40, 64, MAX_ROW_STRIDE - 1, 1), True),
        ((1 << 40, 64, MAX_ROW_STRIDE, 1), False),
        ((1 << 40, 64, 1 << 33, 1), False),
        ((0, 0, 0, 1), True),
        ((8192, 64, 128, 2), False),
    ],
)
def test_rows_near_each_other(strides: tuple[int, ...], stays: bool) -> None:
    x = strided((2, 2, 65, 64), strides)
    y = tidy(x, -2)
    assert (y is x) == stays and y.shape == x.shape
    assert y.stride(-1) == 1 and y.stride(-2) < MAX_ROW_STRIDE


def test_wrong_ranks_are_left_to_the_check() -> None:
    x = torch.randn(1, 2, 3, 8)
    p, number = describe(x, x, x), torch.zeros(())
    given = (number, torch.zeros(3), number, number)
    assert all(found is y for found, y in zip(tidy_gradients(p, *given), given, strict=True))


def test_a_problem() -> None:
    """Only rows that are far apart are copied."""
    near = torch.randn(1, 2, 3, 8)
    p = describe(near, near, near)
    assert laid_out(p) is p
    far = replace(p, k=strided((1, 2, 3, 8), (1 << 40, 1 << 38, MAX_ROW_STRIDE, 1)))
    found = laid_out(far)
    assert found.q is p.q and found.v is p.v and found.k.is_contiguous()


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed: bool) -> None:
    """dout, out, lse and dlse too, in the caller's layout, in which packed rows come first."""
    if packed:
        x, cu = torch.randn(3, 2, 8), torch.tensor([0, 3])
        p, rows, strides = describe(x, x, x, cu_q=cu, cu_k=cu), 0, [8, 1 << 30, 1]
    else:
        x = torch.randn(1, 2, 3, 8)
        p, rows, strides = describe(x, x, x), 2, [1 << 30, 1 << 24, 8, 1]
    near = strided(x.shape, strides)
    given = (near, near, near[..., 0], None)
    assert all(found is y for found, y in zip(tidy_gradients(p, *given), given, strict=True))
    strides[rows] = MAX_ROW_STRIDE
    far = strided(x.shape, strides)
    dout, out, lse, dlse = tidy_gradients(p, far, far, far[..., 0], far[..., 0])
    assert all(y.is_contiguous() and y.shape == x.shape for y in (dout, out))
    assert all(y.is_contiguous() and y.shape == x.shape[:-1] for y in (lse, dlse))


@pytest.mark.parametrize("shape", [(2, 3, 5), (4,), (0, 3), torch.Size((2, 3))], ids=str)
def test_new_tensors_are_contiguous(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and as on a GPU, where torch's function takes the same arguments."""
    guards = torch._C._dynamo.guards
    makers = [tensors.empty(shape, torch.bfloat16, torch.device("cpu"))]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(tensors, "_GUARDS", SimpleNamespace(_empty_strided_cuda=guards._empty_strided_cpu))
    makers.append(tensors.empty(shape, torch.bfloat16, torch.device("cuda", 0)))
    for make in makers:
        x, y = make(), make()
        assert x.shape == shape and x.dtype == torch.bfloat16 and x.is_contiguous()
        assert x.untyped_storage()._cdata != y.untyped_storage()._cdata


def test_unused_results_share_a_buffer_if_they_are_small() -> None:
    """Small results of one dtype share a buffer; each large one has its own."""
    x = torch.randn(1, 2, 3, 8)
    p = describe(x, x, x)
    small, smaller, large = (
        Result(p, 2, n, None, "float32", x.device) for n in (DISCARDED // 2, 3, DISCARDED // 2 + 1)
    )
    wide = Result(p, 2, 3, None, "float64", x.device)
    place = small.discard_buffer()
    assert place.numel() >= small.numel and place.dtype == torch.float32 and place.device == x.device
    assert smaller.discard_buffer().data_ptr() == place.data_ptr()
    assert wide.discard_buffer().dtype == torch.float64
    one, other = large.discard_buffer(), large.discard_buffer()
    assert one.shape == other.shape == large.shape
    assert len({x.data_ptr() for x in (place, one, other, small.empty())}) == 4
