"""Calls of the grid as tensors, and a comparison of their results with arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import flashtile as ft
from flashtile.numerics.dtypes import name_of, widen
from tests.support.grid import Call
from tests.support.runners import why_missing

BACKENDS = [name for name in ("native", "tiles") if why_missing(name) is None]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def given_as_tensor(name: str, x: Any) -> Any:
    """An option of a call of tensors; those that can have gradients require them."""
    if isinstance(x, ft.Spans):
        return ft.Spans.of(tensor(x.limits))
    return tensor(x, name in ("bias", "sink")) if isinstance(x, np.ndarray) else x


def tensor(x: np.ndarray[Any, Any], requires_grad: bool = False) -> torch.Tensor:
    """Return a new tensor with the values of an array, bfloat16 in either NumPy dtype included."""
    name = name_of(x.dtype)
    result = torch.from_numpy(np.array(widen(x))).bfloat16() if name == "bfloat16" else torch.from_numpy(np.array(x))
    return result.requires_grad_(requires_grad)


def randn(*shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> torch.Tensor:
    """Return normal numbers that depend on the shape alone."""
    generator = torch.Generator().manual_seed(sum(7**i * n for i, n in enumerate(shape)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


def as_tensors(call: Call) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return q, k, v, and the options; all inputs that can have gradients require them."""
    options = {name: given_as_tensor(name, x) for name, x in (call.packed | call.options).items()}
    return [tensor(x, True) for x in (call.q, call.k, call.v)], options


def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Call attention(), or attention_packed() if the options have cu_q, with the lse."""
    function = ft.attention_packed if "cu_q" in options else ft.attention
    return function(q, k, v, return_lse=True, **options)


def equal(found: torch.Tensor, wanted: np.ndarray[Any, Any]) -> None:
    """Check for the same dtype, shape and numbers."""
    assert name_of(found.dtype) == name_of(wanted.dtype)
    np.testing.assert_array_equal(found.detach().double().numpy(), widen(wanted, np.float64))
