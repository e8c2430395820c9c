"""The helpers of these tests, checked on the CPU: a helper that notices nothing would let everything pass."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import flashtile as ft
from flashtile.numerics.dtypes import narrow, widen
from tests.gpu.oracle import sampled_keys, sampled_rows, standard
from tests.gpu.order_of_sums import order_sensitive
from tests.gpu.placement import FENCE, NO_FENCE, UNALIGNED, Fence, canaries, place, same_bits
from tests.gpu.runner import Given, Route, agree, by, on
from tests.gpu.test_random import KINDS, problem
from tests.support.grid import LAYOUTS, Case, Size, build, with_layout
from tests.support.runners import Runner

SMALL = Size(2, 4, 2, 9, 11, 8, 6)


@pytest.mark.parametrize("fence", [NO_FENCE, FENCE, UNALIGNED], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_keeps_its_numbers_and_strides(layout: str, fence: Fence) -> None:
    x = with_layout(np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4), layout)
    placed = place(x, "cpu", fence)
    np.testing.assert_array_equal(placed.tensor.numpy(), x)
    if min(x.strides) >= 0:
        assert placed.tensor.numpy().strides == x.strides
    assert placed.tensor.data_ptr() - placed.buffer.data_ptr() == 4 * fence.before
    seen = np.unique(x).size
    assert int(placed.buffer.isnan().sum()) == placed.buffer.numel() - seen, "all the rest is poison"
    assert placed.unchanged()


@pytest.mark.parametrize("at", [0, FENCE.before, -1])
def test_a_write_is_noticed(at: int) -> None:
    placed = place(np.zeros((3, 4), np.float32), "cpu", FENCE)
    placed.buffer[at] = 1.0
    assert not placed.unchanged()


def test_lengths_and_masks_lie_between_poison_too() -> None:
    assert place(np.array([3, 4]), "cpu", FENCE).buffer[0] == torch.iinfo(torch.int64).max
    assert place(np.zeros((3, 4), bool), "cpu", FENCE).buffer[-1]


def test_arrays_of_no_size() -> None:
    for fence in (NO_FENCE, FENCE):
        assert place(np.zeros((2, 0, 4), np.float32), "cpu", fence).tensor.shape == (2, 0, 4)


def test_bits_are_compared() -> None:
    nan, zero = torch.tensor([torch.nan]), torch.zeros(1)
    assert same_bits(nan, nan.clone()) and same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero) and not same_bits(zero, zero.double()) and not same_bits(nan, zero)


def test_canaries_sing() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    with canaries() as birds:
        new = [x.new_empty(2, 5), x.new_empty((2, 5)), torch.empty((4,)), torch.empty_like(x), x.new_zeros((2,))]
    assert [y.shape for y in new] == [(2, 5), (2, 5), (4,), (3,), (2,)]
    assert all(y.isnan().all() for y in new[:4]) and not new[4].any()
    assert all(map(birds.caught, new)) and not birds.caught(x)
    assert birds.untouched()
    for y in new:
        y.fill_(1.0)
    assert birds.untouched(), "their own memory is theirs"
    before = new[0].as_strided((1,), (1,), new[0].storage_offset() - 1)
    before.fill_(1.0)
    assert not birds.untouched()
    assert not torch.zeros(3).new_empty(3).storage_offset(), "and it is over"


@pytest.mark.parametrize("fence", [NO_FENCE, FENCE, UNALIGNED], ids=str)
def test_the_runner_agrees_on_the_cpu(fence: Fence) -> None:
    packed = Size.packed(4, 2, 8, 6, (5, 9), (0, 3), (7, 7))
    for case in (Case(SMALL, "float32", ("everything",)), Case(packed, "bfloat16", ("everything",))):
        agree(case, runner=on("cpu", fence))


def test_the_runner_tells_which_case_is_wrong() -> None:
    right = on("cpu")
    wrong = Runner("cpu", lambda call: right.forward(replace(call, options={"scale": 0.1})), right.backward)
    with pytest.raises(AssertionError, match="causal-float32"):
        agree(Case(SMALL, "float32", ("causal",)), runner=wrong)


def test_the_runner_sees_what_is_written_beside_its_inputs() -> None:
    given = Given(build(Case(SMALL, "float32")), "cpu", FENCE)
    given.forward()
    given.check_untouched()
    given.placed["k"].buffer[-1] = 0.0
    with pytest.raises(AssertionError, match=r"^k, or memory beside it"):
        given.check_untouched()


ON_GPU, ON_CPU = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)


def picky(q: Any, backend: str = "auto", can: bool = True) -> str:
    if backend == "gluon" and not can:
        raise ft.UnsupportedError("backend: gluon cannot run this: it is Monday; could: triton")
    return backend


def test_calls_use_the_selected_backend() -> None:
    route = Route("gluon")
    assert route(picky, ON_GPU) == "gluon"
    assert route(picky, q=ON_GPU) == "gluon"
    assert route(picky, ON_CPU) == "auto"
    assert route(picky, ON_GPU, backend="triton") == "triton"
    assert route(picky, ON_GPU, can=False) == "triton", "not the first call"


def test_an_unsupported_first_call_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="Monday"):
        Route("gluon")(picky, ON_GPU, can=False)

    def broken(q: Any, backend: str) -> None:
        raise ft.UnsupportedError("mask: not on Mondays")

    with pytest.raises(ft.UnsupportedError, match="mask"):
        Route("gluon")(broken, ON_GPU)


def test_the_public_functions_use_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ft, "attention", picky)
    with by("gluon"):
        assert ft.attention(ON_GPU) == "gluon"
    assert ft.attention(ON_GPU) == "auto"


def test_a_sum_in_no_fixed_order_is_told_from_a_wrong_one() -> None:
    x = torch.randn(100).bfloat16()
    once_more = (x.view(torch.int16) + (torch.arange(100) == 7)).view(torch.bfloat16)  # one unit in the last place
    wrong = torch.where(torch.arange(100) == 7, x + 0.5, x)
    results = [x, x, x, x]
    given = Given(build(Case(SMALL, "float32")), "cpu")
    with by("gluon"):
        assert given.alike([x, x, once_more, x], results)
        assert not given.alike([x, x, wrong, x], results)
        assert not given.alike([once_more, x, x, x], results) and not given.alike([x, x, x, once_more], results)
        given.arguments["deterministic"] = True
        assert not given.alike([x, x, once_more, x], results)
    with by("triton"):
        assert not given.alike([x, x, once_more, x], results)


def test_problems_of_a_kind_differ_only_in_numbers() -> None:
    rng = np.random.default_rng(0)
    for kind in KINDS:
        first, second = (problem(kind, rng) for _ in range(2))
        assert first.options.keys() == second.options.keys() and bool(first.packed) == kind.packed
        assert first.q.shape != second.q.shape or first.k.shape != second.k.shape
        assert first.problem().group == kind.group and first.problem().dim == kind.dims[0]


def test_the_oracles_of_torch_are_right() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, h, n, 8, dtype=torch.float64) for h, n in ((4, 9), (2, 5), (2, 5), (4, 9)))
    want = ft.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(standard(q, k, v, causal=True), want)
    q, k, v, dout = (torch.randn(40, 8, dtype=torch.float64, requires_grad=True) for _ in range(4))
    out, lse = ft.attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    at = torch.tensor([0, 1, 17, 39])
    with torch.no_grad():
        torch.testing.assert_close(sampled_rows(q, k, v, dout, at), (out[at], lse[at], dq[at]))
        torch.testing.assert_close(sampled_keys(q, k, v, dout, out, lse, at), (dk[at], dv[at]))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("n", "tile"), [(1000, 128), (1024, 128), (1000, 64)])
def test_order_sensitive_numbers(n: int, tile: int, backwards: bool) -> None:
    """Most swaps of two neighbours show in 16 bits, wherever they occur."""
    call = order_sensitive(1, 1, n, 64, tile)
    keys, values = (widen(x, np.float32)[0, 0] for x in (call.k, call.v))
    out = ft.attention(call.q, call.k, call.v)
    assert not widen(out, np.float32).any(), "so that delta is 0"
    weight = widen(narrow(np.float32([1 / n]), "bfloat16"), np.float32)
    parts = [
        (weight * values[j : j + tile] * keys[j : j + tile]).sum(0, dtype=np.float64).astype(np.float32)
        for j in range(0, n, tile)
    ]
    parts = parts[::-1] if backwards else parts

    def added(order: list[int]) -> Any:
        total = np.zeros_like(parts[0])
        for part in order:
            total = total + parts[part]
        return narrow(total, "bfloat16")

    count, seen = len(parts), 0
    for first in range(count - 1):
        order = [*range(first), first + 1, first, *range(first + 2, count)]
        seen += int((added(order) != added([*range(count)])).mean() > 0.1)
    assert seen >= count // 2
