"""The stand-in for PyTorch's own attention: the same call gives the same results and gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as theirs
from torch.testing import assert_close

import flashtile as ft
from flashtile.compat.sdpa import scaled_dot_product_attention as sdpa

LEADS = [(), (3,), (2, 3), (2, 1, 3), (1, 2, 2, 3)]
lead_axes = pytest.mark.parametrize("lead", LEADS, ids=[f"{len(lead) + 2} axes" for lead in LEADS])


def inputs(
    lead: tuple[int, ...], L: int, S: int, E: int = 8, Ev: int = 8, Hk: int | None = None, seed: int = 0
) -> list[torch.Tensor]:
    """A query, a key and a value that want gradients; Hk heads of keys instead of the last leading axis."""
    fixed = torch.Generator().manual_seed(seed)
    short = lead if Hk is None else (*lead[:-1], Hk)
    shapes = (*lead, L, E), (*short, S, E), (*short, S, Ev)
    return [torch.randn(s, generator=fixed, dtype=torch.float64, requires_grad=True) for s in shapes]


def float_mask(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bool_mask(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def agree(tensors: list[torch.Tensor], mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Asserts that the output and all gradients are those of PyTorch, and returns the output."""
    results = []
    for function in (sdpa, theirs):
        given = [x.detach().clone().requires_grad_() for x in tensors]
        bias = mask
        if mask is not None and mask.is_floating_point():
            bias = mask.detach().clone().requires_grad_()
            given.append(bias)
        out = function(*given[:3], attn_mask=bias, **options)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
        results.append((out.detach(), [x.grad for x in given]))
    (out, grads), (want_out, want_grads) = results
    assert_close(out, want_out, rtol=1e-9, atol=1e-12)
    for found, wanted in zip(grads, want_grads, strict=True):
        assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    return out


def test_signature() -> None:
    found = [(p.name, p.default) for p in inspect.signature(sdpa).parameters.values()]
    none = inspect.Parameter.empty
    wanted = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    assert found == [("query", none), ("key", none), ("value", none), *wanted.items()]


@lead_axes
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(7, 7), (5, 9), (9, 5), (1, 6), (6, 1)])
def test_every_number_of_axes(lead: tuple[int, ...], causal: bool, sizes: tuple[int, int]) -> None:
    agree(inputs(lead, *sizes), is_causal=causal)
    agree(inputs(lead, *sizes, E=8, Ev=5), is_causal=causal)


@lead_axes
@pytest.mark.parametrize("make", [bool_mask, float_mask])
def test_mask_of_the_scores(lead: tuple[int, ...], make: Any) -> None:
    agree(inputs(lead, 5, 7), make(5, 7))
    agree(inputs(lead, 5, 7), make(*lead, 5, 7))


@pytest.mark.parametrize("make", [bool_mask, float_mask])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 7),
        (5, 1),
        (1, 1),
        (3, 5, 7),
        (3, 1, 7),
        (2, 1, 5, 7),
        (2, 1, 1, 7),
        (1, 3, 5, 7),
        (1, 1, 5, 1),
        (2, 3, 1, 1),
    ],
)
def test_mask_that_is_broadcast(make: Any, shape: tuple[int, ...]) -> None:
    agree(inputs((2, 3), 5, 7), make(*shape))


@pytest.mark.parametrize("make", [bool_mask, float_mask])
@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 1, 1, 5, 7), (1, 2, 1, 1, 7), (2, 1, 3, 5, 1)])
def test_mask_that_is_broadcast_over_five_axes(make: Any, shape: tuple[int, ...]) -> None:
    agree(inputs((2, 2, 3), 5, 7), make(*shape))


def test_float_mask_of_infinities() -> None:
    mask = float_mask(2, 1, 5, 7).masked_fill(~bool_mask(2, 1, 5, 7, seed=2), -torch.inf)
    agree(inputs((2, 3), 5, 7), mask)


def test_mask_of_any_strides() -> None:
    agree(inputs((2, 3), 5, 7), bool_mask(7, 5).T)
    agree(inputs((2, 3), 5, 7), bool_mask(1, 7).expand(5, 7))


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("causal", [False, True])
def test_scale(scale: float, causal: bool) -> None:
    agree(inputs((2, 3), 6, 8), scale=scale, is_causal=causal)


@pytest.mark.parametrize("lead", [(6,), (2, 6), (1, 2, 6)])
@pytest.mark.parametrize("Hk", [1, 2, 3, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries(lead: tuple[int, ...], Hk: int, causal: bool) -> None:
    agree(inputs(lead, 5, 7, Hk=Hk), is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("make", [bool_mask, float_mask])
@pytest.mark.parametrize("shape", [(5, 7), (6, 5, 7), (2, 1, 5, 7), (2, 6, 1, 7)])
def test_grouped_queries_under_a_mask(make: Any, shape: tuple[int, ...]) -> None:
    agree(inputs((2, 6), 5, 7, Ev=3, Hk=2), make(*shape), enable_gqa=True, scale=0.4)


@pytest.mark.parametrize("lead", [(2, 3), (2, 2, 3)])
def test_nothing_visible(lead: tuple[int, ...]) -> None:
    mask = bool_mask(5, 7)
    mask[2] = False
    for each in (mask, torch.zeros(5, 7, dtype=torch.float64).masked_fill(~mask, -torch.inf)):
        assert (agree(inputs(lead, 5, 7), each)[..., 2, :] == 0).all()


def test_a_row_that_sees_nothing_has_no_gradient() -> None:
    q, k, v = inputs((2, 3), 5, 7)
    out = sdpa(q, k, v, attn_mask=torch.zeros(5, 7, dtype=torch.bool))
    out.sum().backward()
    for x in (out, q.grad, k.grad, v.grad):
        assert x is not None and (x == 0).all()


def test_hidden_keys_do_not_leak() -> None:
    q, k, v = inputs((2, 3), 5, 7)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[:, 4:] = False
    want = sdpa(q, k[..., :4, :], v[..., :4, :])
    with torch.no_grad():
        k[..., 4:, :] = torch.nan
        v[..., 4:, :] = torch.inf
    assert_close(sdpa(q, k, v, attn_mask=mask), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_nothing_to_do(sizes: tuple[int, int]) -> None:
    out = sdpa(*inputs((2, 3), *sizes))
    assert out.shape == (2, 3, sizes[0], 8) and (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    given = [x.detach().to(dtype) for x in inputs((2, 3), 6, 8)]
    found = sdpa(*given, is_causal=True)
    assert found.dtype == dtype
    wanted = theirs(*(x.double() for x in given), is_causal=True)
    assert_close(found.double(), wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_transposed_inputs() -> None:
    given = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs((2, 3), 6, 8)]
    assert not given[0].is_contiguous()
    assert_close(sdpa(*given), theirs(*given), rtol=1e-9, atol=1e-12)


@given(data=st.data())
def test_any_call(data: st.DataObject) -> None:
    draw = data.draw
    Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lead = (*draw(st.lists(st.integers(1, 2), max_size=2)), Hk * group)
    L, S = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    tensors = inputs(lead, L, S, draw(st.integers(1, 9)), draw(st.integers(1, 9)), Hk, draw(st.integers(0, 99)))
    options: dict[str, Any] = {"scale": draw(st.none() | st.floats(0.1, 2)), "enable_gqa": group > 1}
    mask = None
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind in ("bool", "float"):
        shape = [n if draw(st.booleans()) else 1 for n in (*lead, L, S)]
        shape = shape[draw(st.integers(0, len(lead))) :]
        mask = (bool_mask if kind == "bool" else float_mask)(*shape)
    agree(tensors, mask, is_causal=kind == "causal", **options)


class TestDropout:
    def test_the_same_seed_gives_the_same_result(self) -> None:
        q, k, v = inputs((2, 3), 16, 16)
        torch.manual_seed(5)
        first, second = sdpa(q, k, v, dropout_p=0.4), sdpa(q, k, v, dropout_p=0.4)
        torch.manual_seed(5)
        assert torch.equal(sdpa(q, k, v, dropout_p=0.4), first)
        assert torch.equal(sdpa(q, k, v, dropout_p=0.4), second)
        assert not torch.equal(first, second)
        torch.manual_seed(6)
        assert not torch.equal(sdpa(q, k, v, dropout_p=0.4), first)

    def test_without_it_the_generator_is_left_alone(self) -> None:
        q, k, v = inputs((2, 3), 5, 7)
        before = torch.get_rng_state()
        sdpa(q, k, v).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
        sdpa(q, k, v, dropout_p=0.1)
        assert not torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_weights_are_dropped_or_enlarged(self, p: float) -> None:
        """A value of ones on the diagonal makes the output the weights themselves."""
        q, k, _ = inputs((2, 3), 40, 32)
        v = torch.eye(32, dtype=torch.float64).expand(2, 3, 32, 32)
        ratio = sdpa(q, k, v, dropout_p=p) / sdpa(q, k, v)
        dropped = ratio == 0
        assert_close(ratio[~dropped], torch.full_like(ratio[~dropped], 1 / (1 - p)), rtol=1e-9, atol=0)
        assert abs(dropped.double().mean().item() - p) < 0.03
        assert not torch.equal(dropped[0, 0], dropped[0, 1]) and not torch.equal(dropped[0, 0], dropped[1, 0])

    def test_gradients(self) -> None:
        """The same weights are dropped backward: with the mask in hand plain autograd gives the same gradients."""
        q, k, v = inputs((2, 3), 6, 8)
        eye = torch.eye(8, dtype=torch.float64).expand(2, 3, 8, 8)
        torch.manual_seed(3)
        kept = (sdpa(q, k, eye, dropout_p=0.5) != 0).double()
        torch.manual_seed(3)
        out = sdpa(q, k, v, dropout_p=0.5)
        want = ((q @ k.mT / 8**0.5).softmax(-1) * kept * 2) @ v
        assert_close(out, want, rtol=1e-9, atol=1e-12)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        found = torch.autograd.grad((out * weight).sum(), (q, k, v))
        assert_close(found, torch.autograd.grad((want * weight).sum(), (q, k, v)), rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("p", [1.5, -1, -0.1])
    def test_wrong_values(self, p: float) -> None:
        with pytest.raises(ft.FlashtileError, match="dropout"):
            sdpa(*inputs((2, 3), 5, 7), dropout_p=p)


class TestErrors:
    def test_mask_together_with_causal(self) -> None:
        with pytest.raises(ft.ShapeError, match="is_causal"):
            sdpa(*inputs((2, 3), 5, 5), attn_mask=bool_mask(5, 5), is_causal=True)

    @pytest.mark.parametrize("lead", [(6,), (2, 6), (1, 2, 6)])
    def test_groups_not_asked_for(self, lead: tuple[int, ...]) -> None:
        with pytest.raises(ft.ShapeError, match="enable_gqa"):
            sdpa(*inputs(lead, 5, 7, Hk=2))

    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(ft.ShapeError):
            sdpa(*inputs((2, 6), 5, 7, Hk=4), enable_gqa=True)

    @pytest.mark.parametrize("shape", [(5, 6), (4, 7), (3, 1, 5, 7), (2, 2, 5, 7)])
    def test_mask_that_does_not_fit(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ft.ShapeError, match="mask"):
            sdpa(*inputs((2, 3), 5, 7), attn_mask=bool_mask(*shape))

    def test_mask_of_integers(self) -> None:
        with pytest.raises(ft.FlashtileError, match="mask"):
            sdpa(*inputs((2, 3), 5, 7), attn_mask=torch.ones(5, 7, dtype=torch.int64))

    def test_batches_that_differ(self) -> None:
        q, _, _ = inputs((2, 3), 5, 7)
        _, k, v = inputs((1, 3), 5, 7)
        with pytest.raises(ft.ShapeError):
            sdpa(q, k, v)

    def test_too_few_axes(self) -> None:
        x = torch.zeros(4)
        with pytest.raises(ft.ShapeError):
            sdpa(x, x, x)

    def test_widths_that_differ(self) -> None:
        q, k, v = inputs((2, 3), 5, 7)
        with pytest.raises(ft.ShapeError):
            sdpa(q, k[..., :4], v)

    def test_lengths_that_differ(self) -> None:
        q, k, v = inputs((2, 3), 5, 7)
        with pytest.raises(ft.ShapeError):
            sdpa(q, k, v[..., :4, :])
