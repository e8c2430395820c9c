"""Tensors and arrays share their memory."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from flashtile.dtypes import BFLOAT16, FLOATS, name_of
from flashtile.pytorch.bridge import to_numpy, to_torch


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spread", [lambda x: x, lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6)])
def test_there_and_back(dtype: str, spread: object) -> None:
    x = spread(torch.arange(24).reshape(4, 6).to(getattr(torch, dtype)))  # type: ignore[operator]
    array = to_numpy(x.requires_grad_())
    assert name_of(array.dtype) == dtype and array.shape == x.shape
    assert array.strides == tuple(s * x.element_size() for s in x.stride())
    assert array.__array_interface__["data"][0] == x.data_ptr()
    again = to_torch(array)
    assert torch.equal(again, x) and again.is_contiguous()
    assert (again.data_ptr() == x.data_ptr()) == x.is_contiguous()


def test_bfloat16_is_told_from_integers() -> None:
    assert to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype == BFLOAT16
    assert to_torch(np.full(2, 0x3F80, np.uint16).view(BFLOAT16)).tolist() == [1, 1]
