"""Arrays share the memory of tensors without owning it: the tensors can still be resized."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from flashtile.backends.native import runner
from flashtile.numerics.dtypes import BFLOAT16, FLOATS, name_of
from flashtile.pytorch.bridge import TORCH, to_numpy, to_torch
from tests.pytorch.samples import BACKENDS, every_backend, randn


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spread", [lambda x: x, lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6)])
def test_round_trip(dtype: str, spread: object) -> None:
    x = spread(torch.arange(24).reshape(4, 6).to(getattr(torch, dtype)))  # type: ignore[operator]
    array = to_numpy(x.requires_grad_())
    assert name_of(array.dtype) == dtype and array.shape == x.shape
    assert array.strides == tuple(s * x.element_size() for s in x.stride())
    assert array.__array_interface__["data"][0] == x.data_ptr()
    back = to_torch(array)
    assert torch.equal(back, x) and back.is_contiguous()
    assert back.data_ptr() != x.data_ptr() and not back.requires_grad


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(6).reshape(2, 3).to(dtype)
    np.testing.assert_array_equal(to_numpy(x), x.numpy())
    assert to_numpy(x).dtype == x.numpy().dtype
    pytest.importorskip("ml_dtypes")  # gives NumPy such dtypes
    for lacking in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32):
        with pytest.raises(TypeError):
            to_numpy(torch.zeros(2, dtype=lacking))


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 0)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert to_numpy(x).shape == shape and to_torch(to_numpy(x)).shape == shape


def test_bfloat16_is_no_integer_array() -> None:
    assert to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype == BFLOAT16
    assert to_torch(np.full(2, 0x3F80, np.uint16).view(BFLOAT16)).tolist() == [1, 1]


def test_an_array_keeps_its_tensor_alive() -> None:
    x = torch.ones(3)
    alive = weakref.ref(x)
    array = to_numpy(x)[1:]
    del x
    gc.collect()
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_are_plain_tensors(dtype: str) -> None:
    make = TORCH.maker((2, 3, 4), dtype, None)
    found, other = make(), make()
    assert found.shape == (2, 3, 4) and found.dtype is getattr(torch, dtype) and found.is_contiguous()
    assert found.data_ptr() == TORCH.address(found) != TORCH.address(other) and not found._is_view()
    TORCH.clear(found)
    assert not found.any()


def test_contiguous_copies_are_aligned() -> None:
    memory = torch.zeros(9, dtype=torch.uint8)
    odd = memory[1:].view(torch.uint8)
    between = torch.empty(0, dtype=torch.float32).set_(odd.untyped_storage(), 0, (2,))
    for x in (torch.ones(4, 4).T, torch.ones(4)[::2], between):
        y = TORCH.contiguous(x)
        assert y.is_contiguous() and y.data_ptr() % 4 == 0 and torch.equal(x, y)


LARGE = (1, 1, (1 << 14) + 1, 2)


@every_backend
@pytest.mark.parametrize("shape", [(1, 2, 9, 8), (9, 8), LARGE], ids=str)
def test_tensors_of_the_caller_can_be_resized_afterwards(shape: tuple[int, ...], backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = [randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        keys = shape[-2] if shape != LARGE else 1
        bias = randn(keys, dtype=torch.float32, requires_grad=shape != LARGE)
        given[1:] = [x.detach()[..., :keys, :].clone().requires_grad_() for x in given[1:]]
        out, lse = ft.attention(*given, bias=bias, backend=backend, return_lse=True)
        out.sum().backward()
        for x in (*given, bias, out, lse, *(y.grad for y in (*given, bias))):
            if x is not None:
                x.untyped_storage().resize_(0)


def test_tensors_of_packed_calls_and_plans_can_be_resized_afterwards() -> None:
    x = randn(9, 2, 8, dtype=torch.float32, requires_grad=True)
    starts = torch.tensor([0, 4, 9])
    lengths = torch.tensor([3, 5])
    out = ft.attention_packed(x, x, x, starts, starts, kv_lengths=lengths)
    out.sum().backward()
    ft.plan((9, 2, 8), (9, 2, 8), cu_q=starts, cu_k=starts, kv_lengths=lengths)
    for y in (x, x.grad, out, starts, lengths):
        y.untyped_storage().resize_(0)


@pytest.mark.skipif("native" not in BACKENDS, reason="no compiled core")
def test_results_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = runner.Runner.forward

    def record(*args: Any, **more: Any) -> Any:
        found = plain(*args, **more)
        made.extend(x.data_ptr() for x in found)
        return found

    monkeypatch.setattr(runner.Runner, "forward", record)
    q = randn(*LARGE, dtype=torch.float32)
    found = ft.attention(q, q[:, :, :1], q[:, :, :1], return_lse=True)
    assert [x.data_ptr() for x in found] == made
