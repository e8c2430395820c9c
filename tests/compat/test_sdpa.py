"""compat.sdpa: the same call gives the results and gradients of PyTorch's own function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as theirs
from torch.testing import assert_close

import flashtile as ft
from flashtile.compat import sdpa as compat
from flashtile.compat.sdpa import scaled_dot_product_attention as sdpa

LEADS = [(), (3,), (2, 3), (2, 1, 3), (1, 2, 2, 3)]
lead_axes = pytest.mark.parametrize("lead", LEADS, ids=[f"{len(lead) + 2} axes" for lead in LEADS])


def inputs(
    lead: tuple[int, ...], L: int, S: int, E: int = 8, Ev: int = 8, Hk: int | None = None, seed: int = 0
) -> list[torch.Tensor]:
    """A query, a key and a value that require gradients; Hk key heads instead of the last leading axis."""
    fixed = torch.Generator().manual_seed(seed)
    short = lead if Hk is None else (*lead[:-1], Hk)
    shapes = (*lead, L, E), (*short, S, E), (*short, S, Ev)
    return [torch.randn(s, generator=fixed, dtype=torch.float64, requires_grad=True) for s in shapes]


def float_mask(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bool_mask(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def agree(tensors: list[torch.Tensor], mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Check that the output and all gradients are those of PyTorch, and return the output."""
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


def test_a_row_that_sees_no_key_has_no_gradient() -> None:
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
def test_empty_sizes(sizes: tuple[int, int]) -> None:
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


DTYPES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


@given(data=st.data())
def test_any_shapes_strides_and_dtypes(data: st.DataObject) -> None:
    """Axes of length one are broadcast, and axes may be in any order in memory, or missing."""
    draw = data.draw
    whole = draw(st.lists(st.integers(1, 3), max_size=3))
    dtype, seed = draw(st.sampled_from(list(DTYPES))), draw(st.integers(0, 99))
    L, S, E, Ev = (draw(st.integers(1, 6)) for _ in range(4))
    given = []
    for place, tail in enumerate(((L, E), (S, E), (S, Ev))):
        lead = tuple(n if draw(st.booleans()) else 1 for n in whole[draw(st.integers(0, len(whole))) :])
        shape = (*lead, *tail)
        x = with_order(shape, tuple(draw(st.permutations(range(len(shape))))), seed + place).to(dtype)
        if draw(st.booleans()):
            x = x.repeat_interleave(2, -2)[..., ::2, :]
        if draw(st.booleans()) and x.ndim > 2:
            x = x.expand(*(m if n == 1 else n for n, m in zip(lead, whole[-len(lead) :], strict=True)), *tail)
        given.append(x.detach().requires_grad_())
    options: dict[str, Any] = {"scale": draw(st.none() | st.floats(-2, 2))}
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind in ("bool", "float"):
        mask = (bool_mask if kind == "bool" else float_mask)(
            draw(st.sampled_from([1, L])), draw(st.sampled_from([1, S]))
        )
        options["attn_mask"] = mask if kind == "bool" else mask.to(dtype)
    options["is_causal"] = kind == "causal"
    found, wanted = sdpa(*given, **options), theirs(*given, **options)
    assert found.dtype == dtype and found.shape == wanted.shape
    assert_same_layout(found, wanted)
    tolerance = DTYPES[dtype]
    assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    if dtype in (torch.float64, torch.float32):
        weight = torch.linspace(-1, 1, found.numel(), dtype=dtype).reshape(found.shape)
        grads = [torch.autograd.grad((out * weight).sum(), given) for out in (found, wanted)]
        assert_close(*grads, rtol=tolerance, atol=10 * tolerance)


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

    def test_without_dropout_no_number_is_drawn(self) -> None:
        q, k, v = inputs((2, 3), 5, 7)
        before = torch.get_rng_state()
        sdpa(q, k, v).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
        sdpa(q, k, v, dropout_p=0.1)
        assert not torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_weights_are_dropped_or_scaled(self, p: float) -> None:
        """With an identity matrix as value the output is the weights."""
        q, k, _ = inputs((2, 3), 40, 32)
        v = torch.eye(32, dtype=torch.float64).expand(2, 3, 32, 32)
        ratio = sdpa(q, k, v, dropout_p=p) / sdpa(q, k, v)
        dropped = ratio == 0
        assert_close(ratio[~dropped], torch.full_like(ratio[~dropped], 1 / (1 - p)), rtol=1e-9, atol=0)
        assert abs(dropped.double().mean().item() - p) < 0.03
        assert not torch.equal(dropped[0, 0], dropped[0, 1]) and not torch.equal(dropped[0, 0], dropped[1, 0])

    def test_gradients(self) -> None:
        """Backward drops the same weights: plain autograd with their mask gives the same gradients."""
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

    @pytest.mark.filterwarnings("ignore")
    def test_graphs_of_torchs_tracers_draw_new_seeds(self) -> None:
        q = torch.randn(1, 2, 9, 8)

        def dropped(q: torch.Tensor) -> torch.Tensor:
            return sdpa(q, q, q, dropout_p=0.5)

        for graph in (torch.jit.trace(dropped, (q,), check_trace=False), make_fx(dropped)(q)):
            assert not torch.equal(graph(q), graph(q))

    def test_of_tensors_without_values(self) -> None:
        q = torch.randn(3, 2, 4, 8)
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
            assert sdpa(fake, fake, fake, dropout_p=0.5).shape == q.shape
        with torch.device("meta"):  # new tensors go there, but not these
            assert sdpa(q, q, q, dropout_p=0.5).device == q.device

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_under_vmap(self, randomness: str) -> None:
        q = torch.randn(1, 2, 9, 8).expand(2, -1, -1, -1)
        a, b = torch.func.vmap(lambda q: sdpa(q, q, q, dropout_p=0.5), randomness=randomness)(q)
        assert torch.equal(a, b) == (randomness == "same")

    @pytest.mark.parametrize("p", [1.5, -1, -0.1])
    def test_wrong_values(self, p: float) -> None:
        with pytest.raises(ft.FlashtileError, match="dropout"):
            sdpa(*inputs((2, 3), 5, 7), dropout_p=p)


# Leading axes of query, key and value that are broadcast, and whether heads are grouped

BROADCAST = [
    ((2, 4), (1, 4), (1, 4), False),
    ((1, 4), (3, 4), (3, 4), False),
    ((2, 4), (2, 1), (2, 1), False),
    ((2, 1), (2, 4), (2, 4), False),
    ((2, 4), (2, 1), (2, 4), False),
    ((2, 4), (2, 4), (1, 1), False),
    ((2, 4), (4,), (4,), False),
    ((4,), (2, 4), (2, 4), False),
    ((2, 4), (), (), False),
    ((), (2, 4), (2, 4), False),
    ((), (4,), (), False),
    ((2, 1, 4), (3, 4), (1, 3, 1), False),
    ((2, 8), (2, 2), (2, 4), True),
    ((2, 6), (2, 2), (2, 3), True),
    ((2, 8), (1, 2), (1, 2), True),
    ((2, 8), (2,), (2, 2), True),
    ((3, 1, 8), (2, 2), (1, 4), True),
]


@pytest.mark.parametrize("leads", BROADCAST, ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_axes_that_are_broadcast(leads: Any, kind: str) -> None:
    *shapes, grouped = leads
    tensors = [
        inputs(lead, n, n, 8, 6, seed=i)[place]
        for i, (lead, n, place) in enumerate(zip(shapes, (5, 7, 7), (0, 1, 2), strict=True))
    ]
    mask = {"bool": bool_mask(5, 7), "float": float_mask(5, 7)}.get(kind)
    agree(tensors, mask, is_causal=kind == "causal", enable_gqa=grouped)


@pytest.mark.parametrize("shape", [(5, 7), (4, 5, 7), (2, 1, 5, 7), (2, 4, 1, 7)])
def test_axes_that_are_broadcast_under_a_mask(shape: tuple[int, ...]) -> None:
    q, _, _ = inputs((2, 4), 5, 7)
    _, k, v = inputs((1, 1), 5, 7, seed=1)
    agree([q, k, v], float_mask(*shape))


def test_a_mask_of_as_many_queries_as_sequences() -> None:
    """It is (queries, keys), as always."""
    agree(inputs((5, 2), 5, 7), bool_mask(5, 7))
    agree(inputs((5, 2), 5, 5), float_mask(5, 5))
    agree(inputs((2, 3, 2), 6, 7), bool_mask(6, 7))  # for 2 x 3 sequences
    agree(inputs((2, 3, 1, 2), 6, 6), float_mask(6, 6))


@pytest.mark.parametrize("shape", [(), (7,), (1,)])
def test_a_mask_of_fewer_axes_than_scores(shape: tuple[int, ...]) -> None:
    """As in torch's MATH backend; its CPU kernels refuse such masks."""
    q, k, v = inputs((2, 3), 5, 7)
    agree([q, k, v], float_mask(*shape))
    seen = bool_mask(*shape)
    assert_close(sdpa(q, k, v, seen), theirs(q, k, v, seen.expand(5, 7)))
    q, k, v = inputs((2, 3), 5, 7, 600)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(sdpa(q, k, v, seen), theirs(q, k, v, seen.expand(5, 7)))


def test_a_mask_of_float32_with_float64() -> None:
    agree(inputs((2, 3), 5, 7), float_mask(2, 1, 5, 7).float())


@pytest.mark.parametrize("number", [torch.tensor(0.3), torch.tensor(2), torch.tensor(0.7, dtype=torch.float64)])
def test_scale_in_a_tensor(number: torch.Tensor) -> None:
    agree(inputs((2, 3), 6, 8), scale=number)


def test_scale_in_a_tensor_that_is_not_a_number() -> None:
    for wrong in (torch.tensor([0.3]), torch.tensor(0.3, requires_grad=True)):
        with pytest.raises(TypeError):
            theirs(*inputs((2, 3), 5, 7), scale=wrong)
        with pytest.raises(ft.DTypeError, match=r"^scale: "):
            sdpa(*inputs((2, 3), 5, 7), scale=wrong)


NO_KERNEL: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "a head dim is over 512": ((600, 8), {}),
    "a head dim is 0": ((0, 8), {"is_causal": True}),
    "every weight is dropped": ((8, 8), {"dropout_p": 1.0}),
}


@pytest.fixture
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_warned", set())


@pytest.mark.usefixtures("no_warnings_yet")
@pytest.mark.parametrize("reason", NO_KERNEL)
def test_without_a_kernel_torchs_own_is_called_with_one_warning(reason: str) -> None:
    (E, Ev), options = NO_KERNEL[reason]
    with pytest.warns(UserWarning, match=f"torch's own is called because {reason}") as caught:
        agree(inputs((2, 3), 5, 7, E, Ev), **options)
        agree(inputs((2, 3), 5, 7, Ev, E), **options)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.usefixtures("no_warnings_yet")
@pytest.mark.parametrize("leads", [((2, 0),) * 3, ((0,),) * 3, ((2, 1), (2, 0), (2, 0))])
def test_no_heads(leads: Any) -> None:
    tensors = [inputs(lead, 5, 5)[0] for lead in leads]
    with pytest.warns(UserWarning, match="torch's own is called because there are no heads"):
        agree(tensors)


@pytest.mark.usefixtures("no_warnings_yet")
def test_torchs_own_is_called_even_if_its_name_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    q, k, v = inputs((2, 3), 5, 5, 600)
    with pytest.warns(UserWarning, match="over 512"):
        assert sdpa(q, k, v, causal_lower_right(5, 5)).shape == (2, 3, 5, 8)


# The memory layout of the output


def with_order(shape: tuple[int, ...], order: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor whose axes are in this order in memory."""
    fixed = torch.Generator().manual_seed(seed)
    x = torch.randn([shape[axis] for axis in order], generator=fixed)
    return x.permute([order.index(axis) for axis in range(len(shape))])


LAYOUT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": bool_mask(5, 7)},
    "mask of four axes": {"attn_mask": bool_mask(2, 1, 5, 7)},
    "mask of three axes": {"attn_mask": bool_mask(4, 5, 7)},
    "mask with a gradient": {"attn_mask": float_mask(5, 7).float().requires_grad_()},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("options", LAYOUT_OPTIONS.values(), ids=LAYOUT_OPTIONS.keys())
@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_the_output_has_the_memory_layout_of_torchs(order: tuple[int, ...], options: dict[str, Any]) -> None:
    for L, E in ((5, 8), (1, 8), (5, 6)):
        q, k, v = (
            with_order((2, 4, L, E), order),
            with_order((2, 4, 7, E), (0, 2, 1, 3), 1),
            with_order((2, 4, 7, 8), (0, 1, 2, 3), 2),
        )
        options = {n: x[..., :L, :] if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        assert_same_layout(sdpa(q, k, v, **options), theirs(q, k, v, **options))


def assert_same_layout(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare strides, except of axes of length one, where they mean nothing."""
    places = [[(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] for x in (found, wanted)]
    assert places[0] == places[1]


@pytest.mark.parametrize("heads", [(4, 1, 1), (4, 4, 1), (4, 1, 4), (1, 4, 4), (4, 2, 1), (4, 2, 2)], ids=str)
def test_the_output_of_heads_that_are_shared(heads: tuple[int, int, int]) -> None:
    """torch's is contiguous if heads are broadcast, and has the query's layout if enable_gqa groups them."""
    grouped = 2 in heads
    q = with_order((2, heads[0], 5, 8), (0, 2, 1, 3) if heads[0] > 1 else (2, 0, 1, 3))
    k, v = (torch.randn(2, n, 7, 8) for n in heads[1:])
    assert_same_layout(sdpa(q, k, v, enable_gqa=grouped), theirs(q, k, v, enable_gqa=grouped))


def test_the_output_of_queries_that_are_views() -> None:
    k = with_order((2, 4, 7, 8), (0, 1, 2, 3))
    parts = torch.randn(2, 5, 3, 4, 8)[:, :, 0].transpose(1, 2)
    for q in (
        parts,
        torch.randn(2, 4, 9, 8)[:, :, :5],
        torch.randn(2, 4, 5, 16)[..., :8],
        torch.randn(1, 4, 5, 8).expand(2, -1, -1, -1),
        torch.randn(2, 1, 5, 8).expand(-1, 4, -1, -1),
    ):
        assert_same_layout(sdpa(q, k, k), theirs(q, k, k))
        assert_same_layout(sdpa(q, k[:, :2], k[:, :2], enable_gqa=True), theirs(q, k[:, :2], k[:, :2], enable_gqa=True))
    assert sdpa(parts, k, k).transpose(1, 2).view(2, 5, 32).shape == (2, 5, 32)
    x = torch.randn(3, 2, 5, 4, 8).requires_grad_()
    out = sdpa(*x.transpose(2, 3).unbind()).transpose(1, 2).view(2, 5, 32)
    want = theirs(*x.transpose(2, 3).unbind()).transpose(1, 2).view(2, 5, 32)
    weight = torch.randn(2, 5, 32)
    assert_close(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in (out, want)))


# Biases without values, and nested tensors


@pytest.mark.parametrize("sizes", [(5, 5), (5, 7), (7, 5)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_triangles(make: Any, sizes: tuple[int, int]) -> None:
    L, S = sizes
    tensors = inputs((2, 3), L, S)
    bias = make(L, S)
    found = sdpa(*tensors, attn_mask=bias)
    assert type(found) is torch.Tensor
    if make is causal_lower_right and L > S:
        seen = torch.ones(L, S, dtype=torch.bool).tril(S - L)
        assert_close(found, theirs(*tensors, attn_mask=seen), rtol=1e-9, atol=1e-12)
        assert not found[:, :, : L - S].any()
    else:
        weight = torch.randn_like(found)
        wanted = theirs(*tensors, attn_mask=bias)
        assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        grads = [torch.autograd.grad((x * weight).sum(), tensors) for x in (found, wanted)]
        assert_close(*grads, rtol=1e-9, atol=1e-12)


def test_triangles_of_grouped_heads() -> None:
    agree(inputs((2, 4), 5, 7, Hk=2), is_causal=True, enable_gqa=True)
    tensors = inputs((2, 4), 5, 7, Hk=2)
    for bias in (causal_upper_left(5, 7), causal_lower_right(5, 7)):
        found, wanted = (f(*tensors, attn_mask=bias, enable_gqa=True) for f in (sdpa, theirs))
        assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_triangle_of_another_size() -> None:
    with pytest.raises(ft.ShapeError, match=r"^attn_mask: expected a CausalBias of 5 queries and 7 keys, got"):
        sdpa(*inputs((2, 3), 5, 7), attn_mask=causal_lower_right(4, 7))
    with pytest.raises(ft.ShapeError, match="is_causal"):
        sdpa(*inputs((2, 3), 5, 5), attn_mask=causal_upper_left(5, 5), is_causal=True)


def jagged(lengths: list[int], heads: int, dim: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, (total, heads, dim), and their nested tensor, (batch, heads, lengths, dim)."""
    fixed = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(lengths), heads, dim, generator=fixed, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return rows, torch.nested.nested_tensor_from_jagged(rows, starts).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own creates some
@pytest.mark.parametrize("lengths", [([3, 5, 1], [3, 5, 1]), ([3, 5, 1], [4, 2, 6])], ids=["self", "cross"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}], ids=str)
def test_nested_tensors(lengths: tuple[list[int], list[int]], options: dict[str, Any]) -> None:
    """The result is nested, and its gradients reach the rows."""
    results = []
    for function in (sdpa, theirs):
        rows, (q, k, v) = zip(*(jagged(lengths[i > 0], 4, seed=i) for i in range(3)), strict=True)
        v = torch.nested.nested_tensor_from_jagged(rows[2], k.transpose(1, 2).offsets()).transpose(1, 2)
        if lengths[0] == lengths[1]:
            k, v = (
                torch.nested.nested_tensor_from_jagged(x, q.transpose(1, 2).offsets()).transpose(1, 2) for x in rows[1:]
            )
        out = function(q, k, v, **options)
        assert out.is_nested and out.layout is torch.jagged and out.shape == q.shape  # with the same lengths object
        values = out.transpose(1, 2).values()
        weight = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).reshape(values.shape)
        results.append((values, torch.autograd.grad((values * weight).sum(), rows)))
    assert_close(*results, rtol=1e-9, atol=1e-12)


def test_nested_tensors_with_causal_and_grouped_heads() -> None:
    """torch takes these only on a GPU, so compare with separate sequences."""
    _, q = jagged([3, 5, 1], 4)
    _, k = jagged([4, 2, 6], 2, seed=1)
    out = sdpa(q, k, k, is_causal=True, enable_gqa=True)
    for a, b, found in zip(q.unbind(), k.unbind(), out.unbind(), strict=True):
        assert_close(found, theirs(a, b, b, is_causal=True, enable_gqa=True), rtol=1e-9, atol=1e-12)
    torch.manual_seed(0)
    assert (sdpa(q, q, q, dropout_p=0.5).values() != sdpa(q, q, q).values()).any()


def test_nested_by_heads() -> None:
    """As in torch, attention is over the last two axes, whichever axis is ragged."""
    rows = torch.randn(9, 6, 8, dtype=torch.float64)
    x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 4, 9]))
    assert_close(sdpa(x, x, x).values(), theirs(x, x, x).values(), rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("no_warnings_yet")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("reason", ["a head dim is over 512", "every weight is dropped"])
def test_nested_tensors_without_a_kernel_go_to_torchs_own(reason: str) -> None:
    (E, _), options = NO_KERNEL[reason]
    results = []
    for function in (sdpa, theirs):
        rows, q = jagged([3, 5, 1], 4, E)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = function(q, q, q, **options)
        assert (function is sdpa) == any(f"torch's own is called because {reason}" in str(x.message) for x in caught)
        values = out.transpose(1, 2).values()
        results.append((values, torch.autograd.grad(values.square().sum(), rows)))
    assert_close(results[0], results[1])


def test_nested_tensors_that_do_not_fit() -> None:
    _, q = jagged([3, 5, 1], 4)
    _, k = jagged([4, 2], 4)
    _, few = jagged([3, 5, 1], 2)
    dense = torch.randn(3, 4, 5, 8, dtype=torch.float64)
    gaps = torch.nested.narrow(
        torch.randn(3, 6, 4, 8).double(), 1, torch.tensor([0, 1, 2]), torch.tensor([3, 5, 1]), layout=torch.jagged
    ).transpose(1, 2)
    for tensors, argument, options in (
        ((q, k, k), "cu_k", {}),
        ((q, dense, dense), "key", {}),
        ((dense, q, q), "query", {}),
        ((q, few, few), "enable_gqa", {}),
        ((gaps, gaps, gaps), "query", {}),
        ((q, q, q), "attn_mask", {"attn_mask": bool_mask(5, 5)}),
        ((q.transpose(1, 2), q, q), "query", {}),
    ):
        with pytest.raises(ft.FlashtileError, match=f"^{argument}: expected") as caught:
            sdpa(*tensors, **options)
        assert isinstance(caught.value, RuntimeError)


@pytest.mark.usefixtures("no_warnings_yet")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_old_layout_go_to_torchs_own() -> None:
    x = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)])
    with pytest.warns(UserWarning, match="tensors are nested, but not of layout"):
        found = sdpa(x, x, x)
    for a, b in zip(found.unbind(), theirs(x, x, x).unbind(), strict=True):
        assert_close(a, b)


# Compilers


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestCompilers:
    @pytest.mark.filterwarnings("ignore:.*torch's own is called")
    def test_one_graph(self) -> None:
        q, k, v = (with_order((2, 4, 6, 8), (0, 2, 1, 3), i) for i in range(3))
        wide, seen = torch.randn(2, 4, 6, 600), bool_mask(6, 6)
        for f in (
            lambda q, k, v: sdpa(q, k, v, is_causal=True).transpose(1, 2).view(2, 6, 32),
            lambda q, k, v: sdpa(q, k[:1], v[:1, :1]),
            lambda q, k, v: sdpa(q, k[:, :2], v[:, :1], enable_gqa=True),
            lambda q, k, v: sdpa(q, k, v, seen),
            lambda q, k, v: sdpa(wide, wide, v),
        ):
            torch._dynamo.reset()
            compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
            assert_close(compiled(q, k, v), f(q, k, v))

    def test_one_graph_of_a_triangle(self) -> None:
        q, bias = torch.randn(2, 4, 6, 8), causal_lower_right(6, 6)
        compiled = torch.compile(lambda q, bias: sdpa(q, q, q, bias), fullgraph=True, backend="aot_eager")
        assert_close(compiled(q, bias), theirs(q, q, q, is_causal=True))

    def test_one_graph_of_nested_tensors(self) -> None:
        def rows(rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            q = torch.nested.nested_tensor_from_jagged(rows, starts).transpose(1, 2)
            return sdpa(q, q, q, is_causal=True).transpose(1, 2).values()

        given = torch.randn(9, 4, 8), torch.tensor([0, 4, 9])
        assert_close(torch.compile(rows, fullgraph=True, backend="aot_eager")(*given), rows(*given))

    @pytest.mark.parametrize("strict", [False, True])
    def test_exported_with_a_batch_that_depends_on_data(self, strict: bool) -> None:
        class Layer(torch.nn.Module):
            def forward(self, x: torch.Tensor, chosen: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
                rows = chosen.nonzero()[:, 0]
                q = x[rows]
                return sdpa(q, q, q, attn_mask=seen[rows]) + sdpa(q, q, q, attn_mask=seen[:1])

        x, chosen = torch.randn(4, 2, 5, 8), torch.tensor([True, False, True, True])
        seen = bool_mask(4, 1, 5, 5)
        program = torch.export.export(Layer(), (x, chosen, seen), strict=strict)
        for n in (3, 1):
            chosen = torch.arange(4) < n
            assert_close(program.module()(x, chosen, seen), Layer()(x, chosen, seen))

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("axis", [1, 2])
    def test_exported_with_a_slice_that_depends_on_data(self, axis: int, strict: bool) -> None:
        class Layer(torch.nn.Module):
            def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
                n = share.item()
                torch._check(n >= 2)
                torch._check(n <= 4)
                q = x[:, :n] if axis == 1 else x[:, :, :n]
                return sdpa(q, x, x) if axis == 2 else sdpa(q, q, q)

        x = torch.randn(2, 4, 5, 8)
        program = torch.export.export(Layer(), (x, torch.tensor(3)), strict=strict)
        for n in (2, 4):
            assert_close(program.module()(x, torch.tensor(n)), Layer()(x, torch.tensor(n)))

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("heads", [(4, 1, 1), (4, 1, 4), (8, 2, 4)], ids=str)
    def test_exported_with_any_number_of_heads(self, heads: tuple[int, int, int], strict: bool) -> None:
        class Layer(torch.nn.Module):
            def forward(self, *given: torch.Tensor) -> torch.Tensor:
                return sdpa(*given, enable_gqa=heads[0] == 8)

        every = [[torch.randn(2, n * (times if n > 1 else 1), 5, 8) for n in heads] for times in (1, 2)]
        auto = torch.export.Dim.AUTO
        shapes = {"given": tuple({1: auto} if n > 1 else {} for n in heads)}
        program = torch.export.export(Layer(), tuple(every[0]), dynamic_shapes=shapes, strict=strict)
        for some in every:
            assert_close(program.module()(*some), Layer()(*some))

    @pytest.mark.parametrize("heads", [(4, 1, 4), (8, 2, 4)], ids=str)
    def test_one_graph_of_any_number_of_heads(self, heads: tuple[int, int, int]) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(sdpa, fullgraph=True, dynamic=True, backend="aot_eager")
        q, k, v = (torch.randn(2, n, 5, 8) for n in heads)
        grouped = heads[0] == 8
        assert_close(compiled(q, k, v, enable_gqa=grouped), theirs(q, k, v, enable_gqa=grouped))

    @pytest.mark.filterwarnings("ignore")
    def test_scripted(self) -> None:
        def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return sdpa(q, k, v, attn_mask=mask, dropout_p=0.0, scale=0.4) + sdpa(q, k, v, is_causal=True)

        q, k, v = (x.detach() for x in inputs((2, 3), 5, 7))
        scripted = torch.jit.script(layer)
        assert_close(scripted(q, k, v, bool_mask(5, 7)), layer(q, k, v, bool_mask(5, 7)))
        traced = torch.jit.trace(layer, (q, k, v, bool_mask(5, 7)))
        assert_close(traced(k, k, v, bool_mask(7, 7)), layer(k, k, v, bool_mask(7, 7)))


class TestErrors:
    def test_they_are_runtime_errors_too(self) -> None:
        """Like those of torch, which callers may catch."""
        q, k, v = inputs((2, 3), 5, 7)
        for tensors, options in (
            ((q, k[..., :4], v), {}),
            ((q, k.float(), v), {}),
            ((q, k, v), {"attn_mask": torch.ones(5, 7, dtype=torch.int64)}),
            ((q, k, v), {"dropout_p": 1.5}),
            ((q, inputs((2, 2), 5, 7)[1], v), {}),
        ):
            for function, error in ((theirs, RuntimeError), (sdpa, RuntimeError), (sdpa, ft.FlashtileError)):
                with pytest.raises(error):
                    function(*tensors, **options)
        with pytest.raises(ValueError, match="query"):  # and also the type they have in attention()
            sdpa(q[0, 0, 0], k, v)

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("query", {"query": torch.zeros(2, 3, 5, 8, dtype=torch.int64)}),
            ("key", {"key": torch.zeros(2, 3, 7, 8)}),
            ("value", {"value": torch.zeros(2, 3, 6, 8).double()}),
            ("attn_mask", {"attn_mask": bool_mask(5, 6)}),
            ("attn_mask", {"attn_mask": float_mask(5, 6)}),
            ("attn_mask", {"attn_mask": float_mask(5, 7).half()}),
            ("dropout_p", {"dropout_p": 1.5}),
            ("is_causal", {"is_causal": None}),
            ("is_causal", {"is_causal": 1}),
            ("is_causal", {"is_causal": torch.tensor(True)}),
            ("enable_gqa", {"enable_gqa": None}),
        ],
    )
    def test_arguments_have_the_names_of_torch(self, name: str, wrong: dict[str, Any]) -> None:
        right = dict(zip(("query", "key", "value"), inputs((2, 3), 5, 7), strict=True))
        with pytest.raises(ft.FlashtileError, match=rf"^{name}: expected"):
            sdpa(**right | wrong)

    def test_mask_together_with_causal(self) -> None:
        with pytest.raises(ft.ShapeError, match="is_causal"):
            sdpa(*inputs((2, 3), 5, 5), attn_mask=bool_mask(5, 5), is_causal=True)

    @pytest.mark.parametrize("lead", [(6,), (2, 6), (1, 2, 6)])
    def test_grouped_heads_without_enable_gqa(self, lead: tuple[int, ...]) -> None:
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
        _, k, v = inputs((4, 3), 5, 7)
        with pytest.raises(ft.ShapeError, match=r"^query, key, value: expected leading axes that broadcast"):
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
