"""A wrong call on a GPU raises the same message as on the CPU, and launches nothing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from tests.test_problem import BASES, WRONG, Wrong, call, name_of

VALUES = re.compile("rise from|values from")


def on(device: str, given: dict[str, Any]) -> dict[str, Any]:
    return {n: torch.from_numpy(x).to(device) if isinstance(x, np.ndarray) else x for n, x in given.items()}


def told(function: str, given: dict[str, Any]) -> tuple[type[Exception], str]:
    with pytest.raises(ft.FlashtileError) as caught:
        call(function, given)
    return caught.type, str(caught.value).replace(", device='cuda:0'", "")  # where a tensor is shown


def for_tensors(wrong: Wrong) -> bool:
    """Whether a wrong call can be made with tensors, and recognised by shapes and dtypes.

    Lengths on a device are not read, so their values pass, and so does the longest of packed sequences.
    """
    function, change, _, argument = wrong
    given = BASES[function]() | change
    if function not in ("attention", "attention_packed", "merge") or any(_of_numpy_alone(x) for x in given.values()):
        return False
    looked_at = function == "attention_packed" and argument in ("mask", "bias")
    return not looked_at and not VALUES.search(told(function, given)[1])


def _of_numpy_alone(x: Any) -> bool:
    """Whether torch has no such tensor."""
    return isinstance(x, np.ma.MaskedArray) or (
        isinstance(x, np.ndarray) and (x.dtype == np.object_ or not x.dtype.isnative)
    )


CALLS = [wrong for wrong in WRONG if for_tensors(wrong)]
cuda = pytest.param("cuda", marks=pytest.mark.gpu)
each_device = pytest.mark.parametrize("device", ["meta", cuda])


@each_device
@pytest.mark.parametrize("wrong", CALLS, ids=name_of)
def test_wrong_calls(wrong: Wrong, device: str) -> None:
    """meta tensors are described as CUDA tensors are, so that much is tested without a GPU."""
    function, change, _, _ = wrong
    if device == "meta" and "backend" in change:
        pytest.skip("tensors without numbers never meet a backend")
    given = BASES[function]() | change
    assert told(function, on(device, given)) == told(function, on("cpu", given))


def test_most_wrong_calls_are_among_them() -> None:
    assert len(CALLS) >= 90


OPTIONS = {
    "mask": np.ones((5, 7), bool),
    "bias": np.zeros((5, 7), np.float32),
    "alibi": np.zeros(4, np.float32),
    "sink": np.zeros(4, np.float32),
    "kv_lengths": np.array([1, 2]),
}


@each_device
@pytest.mark.parametrize("function", ["attention", "attention_packed", "merge"])
def test_an_argument_on_another_device_is_named(function: str, device: str) -> None:
    options = {} if function == "merge" else OPTIONS
    whole = on(device, BASES[function]() | options)
    first = next(iter(whole))
    for name in list(whole)[1:]:
        given = whole | on("cpu", {name: (BASES[function]() | options)[name]})
        error, text = told(function, given)
        place = whole[first].device
        assert (error, text) == (ft.DTypeError, f"{name}: expected a tensor on {place} like {first}, got one on cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["native", "tiles", "reference"])
def test_a_backend_of_another_device(backend: str) -> None:
    error, text = told("attention", on("cuda", BASES["attention"]()) | {"backend": backend})
    assert error is ft.UnsupportedError
    assert text.startswith(f"backend: {backend} cannot run this: it runs on cpu, the tensors are on cuda; could: ")


@pytest.mark.gpu
def test_wrong_calls_leave_the_gpu_alone() -> None:
    """After all of them, a right call is right."""
    for function, change, _, _ in CALLS:
        told(function, on("cuda", BASES[function]() | change))
    right = on("cuda", BASES["attention"]())
    assert not ft.attention(**right).any()
    torch.cuda.synchronize()
