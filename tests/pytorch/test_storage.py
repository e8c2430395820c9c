"""Tensors with freed or shrunk storage, and nested ones, are refused by name, also by cached calls."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from flashtile.pytorch import calls
from tests.pytorch.samples import every_backend

NAMES = ("q", "k", "v", "mask", "bias", "alibi", "sink", "kv_lengths")


def tensors() -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    given = {name: torch.randn(2, 4, 20, 16, generator=rng) for name in ("q", "k", "v")}
    return given | {
        "mask": torch.ones(2, 1, 1, 20, dtype=torch.bool),
        "bias": torch.zeros(20, 20),
        "alibi": torch.rand(4, generator=rng),
        "sink": torch.randn(4, generator=rng),
        "kv_lengths": torch.tensor([20, 20]),
    }


def attention(given: dict[str, Any], **more: Any) -> Any:
    return ft.attention(**given, **more)


def shrink(x: Any, share: float) -> None:
    storage = x.untyped_storage()
    storage.resize_(int(storage.nbytes() * share))


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", ["none", "all"])
def test_a_shrunk_storage_is_refused(options: str, name: str, share: float) -> None:
    given = tensors() if options == "all" else {n: tensors()[n] for n in {"q", "k", "v", name}}
    for _ in range(2):
        out = attention(given)
    shrink(given[name], share)
    needed = "16" if name in ("alibi", "sink", "kv_lengths") else r"\d+"
    with pytest.raises(ft.ShapeError, match=rf"^{name}: expected a storage of at least {needed} bytes, for its shape"):
        attention(given)
    calls._known.clear()
    with pytest.raises(ft.ShapeError, match=rf"^{name}: expected a storage"):
        attention(given)
    assert torch.equal(attention({n: tensors()[n] for n in given}), out)


def test_masks_that_are_combined_before_the_call() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    mask, padding = torch.ones(2, 4, 6, 6, dtype=torch.bool), torch.ones(2, 6, dtype=torch.bool)
    for name, wrong in (("mask", mask), ("key_padding_mask", padding)):
        given = {"mask": mask, "key_padding_mask": padding} | {name: wrong.clone()}
        shrink(given[name], 0.5)
        with pytest.raises(ft.ShapeError, match=f"^{name}: expected a storage of at least"):
            ft.attention(q, k, v, **given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_in_the_layout_bnhd() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    k = k.clone()
    shrink(k, 0)
    with pytest.raises(ft.ShapeError, match=r"^k: expected a storage of at least"):
        ft.attention(q, k, v, layout="bnhd")
    nested = torch.nested.nested_tensor([*q.unbind()])
    with pytest.raises(ft.DTypeError, match=r"^q: expected a dense tensor"):
        ft.attention(nested, nested, nested, layout="bnhd")


@every_backend
def test_every_backend_refuses_a_freed_storage(backend: str) -> None:
    given = tensors()
    shrink(given["v"], 0)
    with pytest.raises(ft.ShapeError, match=r"^v: expected a storage"):
        attention(given, backend=backend)


def test_only_views_beyond_the_end_of_a_shrunk_storage_are_refused() -> None:
    """All three tensors are views of one storage, whose first part remains."""
    whole = torch.randn(3, 2, 4, 20, 16)
    q, k, v = whole
    for _ in range(2):
        ft.attention(q, k, v)
    shrink(whole, 2 / 3)
    ft.attention(q, k, k.clone())
    with pytest.raises(ft.ShapeError, match=rf"^v: expected a storage of at least {whole.numel() * 4} bytes"):
        ft.attention(q, k, v)
    whole.untyped_storage().resize_(whole.numel() * 4)
    whole.normal_()
    assert torch.equal(ft.attention(q, k, v), ft.attention(q, k, v.clone()))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "out"])
def test_a_storage_freed_between_the_two_passes(name: str) -> None:
    given = {n: tensors()[n].requires_grad_() for n in ("q", "k", "v", "bias")}
    for _ in range(2):
        out = attention(given)
    loss = out.sum()
    shrink({"out": out, **given}[name], 0)
    with pytest.raises(ft.ShapeError, match=rf"^{name}: expected a storage"):
        loss.backward()


def test_an_empty_tensor_needs_no_storage() -> None:
    q = torch.randn(1, 2, 3, 8)
    k = torch.empty(1, 2, 0, 8)
    k.untyped_storage().resize_(0)
    for _ in range(2):
        assert not ft.attention(q, k, k).any()


def test_lengths_of_a_plan() -> None:
    lengths = torch.tensor([3])
    shrink(lengths, 0)
    with pytest.raises(ft.ShapeError, match=r"^kv_lengths: expected a storage of at least 8 bytes"):
        ft.plan((1, 2, 3, 8), (1, 2, 3, 8), kv_lengths=lengths)


def test_8_bit_tensors() -> None:
    q = torch.randn(1, 2, 3, 8).to(torch.float8_e4m3fn)
    shrink(q, 0)
    with pytest.raises(ft.ShapeError, match=r"^q: expected a storage of at least 48 bytes"):
        ft.attention(q, q, q)


NESTED = """
import warnings
import torch, flashtile as ft
from tests.pytorch.test_storage import attention, tensors
warnings.simplefilter("ignore")
for name in {names}:
    given = tensors() | dict.fromkeys(("alibi", "sink", "kv_lengths")) | ({{"bias": None}} if name == "mask" else {{}})
    given = {{n: x for n, x in given.items() if n in ("q", "k", "v", name)}}
    for _ in range(2):
        attention(given)
    x = given[name]
    given[name] = torch.nested.nested_tensor([*x[None]] if x.ndim < 3 else [*x])
    for training in (False, True):
        try:
            attention({{n: y.requires_grad_(training) if n == "q" else y for n, y in given.items()}})
        except ft.DTypeError as error:
            print(error)
"""


def test_nested_tensors_in_cached_calls() -> None:
    """In a separate process, because torch's guards used to end it."""
    names = ("q", "k", "v", "mask", "bias")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", NESTED.format(names=names)], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stderr
    wanted = [f"{name}: expected a dense tensor, got a nested one" for name in names for _ in range(2)]
    assert done.stdout.splitlines() == wanted


def test_unaligned_tensors() -> None:
    """They are copied, also if the call is cached."""
    given = {name: tensors()[name] for name in ("q", "k", "v", "bias")}
    out = attention(given)
    for name, x in given.items():
        room = torch.zeros(x.numel() * 4 + 1, dtype=torch.uint8)
        numbers = torch.frombuffer(room.numpy()[1:], dtype=torch.float32)
        shifted = numbers.view(x.shape).copy_(x)
        assert shifted.data_ptr() % 4
        assert torch.equal(attention(given | {name: shifted}), out)
    rows = torch.frombuffer(bytearray(1 + 4 * 16), dtype=torch.float32, offset=1).normal_()
    k = rows.expand(2, 4, 20, 16)
    calls._known.clear()
    attention({**given, "k": rows.clone().expand(2, 4, 20, 16)})
    assert torch.equal(attention({**given, "k": k}), attention({**given, "k": k.clone()}))
