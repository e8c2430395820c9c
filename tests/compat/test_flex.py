"""compat.flex: the same call gives the results of torch's flex_attention, and the gradients of its definition."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.testing import assert_close

import flashtile as ft
from flashtile import masks
from flashtile.checks.shapes import MAX_DIM
from flashtile.compat import block_mask as block_masks
from flashtile.compat import flex, mods, score_mod
from flashtile.compat.flex import AuxRequest

theirs: Any = importlib.import_module("torch.nn.attention.flex_attention")
flex_attention: Any = flex.flex_attention
create_block_mask: Any = flex.create_block_mask
BATCH, HEADS = 2, 4
SIZES = [(40, 40), (24, 50), (50, 24)]
Mod = Callable[..., Any]

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3]).repeat_interleave(6)
LENGTHS = torch.tensor([17, 31])
SLOPES = torch.exp2(-torch.arange(1, HEADS + 1) * 2.0)
TABLE = torch.randn(HEADS, 128, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
MASKS: dict[str, Mod] = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j <= 7),
    "both sides": lambda b, h, i, j: (i - j).abs() <= 5,
    "prefix": lambda b, h, i, j: (j < 9) | (i >= j),
    "documents": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "causal documents": theirs.and_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j]),
    "dilated": lambda b, h, i, j: (i >= j) & ((i - j) % 3 == 0) & (i - j < 20),
    "natten": lambda b, h, i, j: (i.clamp(4, 19) - j).abs() <= 4,
    "padding": lambda b, h, i, j: j < LENGTHS[b],
    "global and local": theirs.or_masks(lambda b, h, i, j: (i - j).abs() <= 3, lambda b, h, i, j: (i < 4) | (j < 4)),
    "by head": lambda b, h, i, j: (i >= j) & (i - j <= 4 * h + 2),
    "some rows see nothing": lambda b, h, i, j: (i % 3 != 0) & (j < 12 * (b + 1)),
    "all": theirs.noop_mask,
    "nothing": lambda b, h, i, j: j < 0,
}
SCORES: dict[str, Mod] = {
    "softcap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "negative softcap": lambda s, b, h, i, j: -3.5 * (s / 4).tanh(),
    "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "symmetric alibi": lambda s, b, h, i, j: s - (i - j).abs() * SLOPES[h] * (b + 1),
    "distance": lambda s, b, h, i, j: s + (i - j),
    "relative": lambda s, b, h, i, j: s + TABLE[h][i - j + 64],
    "absolute": lambda s, b, h, i, j: s + TABLE[h, i] - TABLE[0, j],
    "of keys": lambda s, b, h, i, j: TABLE[2, j] - (-s),
    "of queries": lambda s, b, h, i, j: torch.add(s, TABLE[2, i], alpha=2),
    "number": lambda s, b, h, i, j: 2 - s * 0.5,
    "tensors first": lambda s, b, h, i, j: TABLE[0, 0] * (TABLE[2, j] + s) + SLOPES[h],
    "numbers first": lambda s, b, h, i, j: 3 * (1 + torch.sub(s, TABLE[1, j])) / s.new_full((), 2.0),
    "scale": lambda s, b, h, i, j: s * 2 / 3,
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "hidden by bias": lambda s, b, h, i, j: s + torch.where(i >= j, 0.5 * h, -torch.inf),
    "filled": lambda s, b, h, i, j: s.masked_fill((i - j).abs() > 6, float("-inf")) * 0.5,
    "tensor of inf": lambda s, b, h, i, j: torch.where(j > i + 3, torch.full_like(s, -torch.inf), s) / 1.25,
    "softcap, then bias": lambda s, b, h, i, j: torch.tanh(s * 0.1) / 0.1 + TABLE[h][i - j + 64],
    "softcap, bias, alibi, causal": lambda s, b, h, i, j: torch.where(
        i >= j, 5 * torch.tanh(s / 5) + TABLE[0, j] + SLOPES[h] * (j - i), -float("inf")
    ),
    "either": lambda s, b, h, i, j: torch.where(h < 2, s + TABLE[h, j], torch.where(i >= j, s, -torch.inf)),
    "documents": lambda s, b, h, i, j: torch.where(DOCUMENTS[i] == DOCUMENTS[j], s.double() + 0, -torch.inf),
    "natten": lambda s, b, h, i, j: torch.where((i.clamp(4, 19) - j).abs() <= 4, s, float("-inf")),
}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run torch's function without its own compilation, and without warnings of it."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "return_lse is deprecated", FutureWarning)
        yield


def inputs(
    n_q: int, n_k: int, heads: int = HEADS, kv_heads: int = HEADS, dim: int = 8, seed: int = 0, batch: int = BATCH
) -> Any:

    fixed = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, n_q, dim), (batch, kv_heads, n_k, dim), (batch, kv_heads, n_k, dim)
    return [2 * torch.randn(shape, generator=fixed, dtype=torch.float64) for shape in shapes]


def agree(tensors: Any, mod: Mod | None = None, mask: Mod | None = None, **options: Any) -> Any:
    """Check output and lse against torch's, by a block mask of ours and by one of torch's; return the output."""
    (batch, heads, n_q, _), n_k = tensors[0].shape, tensors[1].shape[2]
    block_masks: list[Any] = [None]
    wanted_mask = None
    if mask is not None:
        wanted_mask = theirs.create_block_mask(mask, batch, heads, n_q, n_k, device="cpu")
        block_masks = [create_block_mask(mask, batch, heads, n_q, n_k, device="cpu"), wanted_mask]
    want, want_lse = theirs.flex_attention(*tensors, mod, wanted_mask, return_lse=True, **options)
    for each in block_masks:
        out, lse = flex_attention(*tensors, mod, each, return_lse=True, **options)
        assert lse.dtype == want_lse.dtype
        assert_close(out, want, rtol=1e-9, atol=1e-11)
        assert_close(lse, want_lse, rtol=1e-9, atol=1e-11)
    return out


def by_definition(tensors: Any, mod: Mod | None = None, mask: Mod | None = None) -> Any:
    """Output and lse with gradients, which torch's lack on a CPU. Queries that see nothing give 0 and -inf."""
    q, k, v = tensors
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    at = [torch.arange(n) for n in scores.shape]
    with TransformGetItemToIndex():
        if mod is not None:
            scores = theirs._vmap_for_bhqkv(mod, (0,))(scores, *at)
        if mask is not None:
            scores = scores.masked_fill(~theirs._vmap_for_bhqkv(mask, ())(*at), -torch.inf)
    some = (scores > -torch.inf).any(-1, keepdim=True)
    safe = torch.where(some, scores, 0)
    return torch.where(some, safe.softmax(-1), 0) @ v, torch.where(some[..., 0], safe.logsumexp(-1), -torch.inf)


def same_gradients(tensors: Any, mod: Mod | None, mask: Mod | None, learned: tuple[torch.Tensor, ...] = ()) -> None:
    """Through output and lse, of q, k, v and what the score_mod has learned."""
    leaves: Any = [x.detach().requires_grad_() for x in tensors]
    q, k, _ = leaves
    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(mask, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device="cpu")
    results = flex_attention(*leaves, mod, block_mask, enable_gqa=True, return_lse=True)
    found = []
    for out, lse in (results, by_definition(leaves, mod, mask)):
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        total = (out * weight).sum() + torch.where(lse > -torch.inf, lse, 0).cos().sum()
        found.append(torch.autograd.grad(total, (*leaves, *learned)))
    for ours, wanted in zip(*found, strict=True):
        assert_close(ours, wanted, rtol=1e-8, atol=1e-10)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    """A list that grows with each call of a function."""
    function, runs = getattr(module, name), []

    def run(*args: Any) -> Any:
        runs.append(name)
        return function(*args)

    monkeypatch.setattr(module, name, run)
    return runs


@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask"])
def test_signature(name: str) -> None:
    wanted, found = (inspect.signature(getattr(x, name)).parameters for x in (theirs, flex))
    assert [(p.name, p.default, p.kind) for p in found.values()] == [
        (p.name, p.default, p.kind) for p in wanted.values()
    ]


def test_names() -> None:
    """An import from torch's module works from ours."""
    assert set(theirs.__all__) - set(flex.__all__) <= {"FlexKernelOptions"}  # a type for annotations


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, size: tuple[int, int]) -> None:
    agree(inputs(*size), mask=MASKS[name])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str, size: tuple[int, int]) -> None:
    agree(inputs(*size), SCORES[name])


@pytest.mark.parametrize("mask", ["causal", "by head", "padding", "some rows see nothing"])
@pytest.mark.parametrize("mod", ["softcap", "alibi", "relative", "causal", "either"])
def test_score_mods_under_masks(mod: str, mask: str) -> None:
    agree(inputs(24, 50), SCORES[mod], MASKS[mask], scale=0.3)
    same_gradients(inputs(24, 50), SCORES[mod], MASKS[mask])


@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_masks(name: str) -> None:
    same_gradients(inputs(30, 40, kv_heads=2), None, MASKS[name])


@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_score_mods(name: str) -> None:
    same_gradients(inputs(30, 40, kv_heads=2), SCORES[name], None)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries(kv_heads: int) -> None:
    given = inputs(24, 30, kv_heads=kv_heads)
    agree(given, SCORES["alibi"], MASKS["by head"], enable_gqa=True)


def test_what_becomes_of_masks() -> None:
    """The cheapest option that says the same."""

    def options(mask: Mod, n_q: int = 40, n_k: int = 50) -> Any:
        return create_block_mask(mask, BATCH, HEADS, n_q, n_k, device="cpu").seen.options()

    assert options(MASKS["all"]) == {}
    assert options(MASKS["causal"]) == {"band": ft.Band(right=0)}
    assert options(MASKS["window"]) == {"band": ft.Band(left=7, right=0)}
    assert options(lambda b, h, i, j: j >= i + 4) == {"band": ft.Band(left=-4)}
    assert options(MASKS["padding"])["spans"].limits.shape == (BATCH, 1, 1, 1, 2)
    assert options(MASKS["by head"])["spans"].limits.shape == (1, HEADS, 40, 1, 2)
    assert options(MASKS["causal documents"])["spans"].limits.shape == (1, 1, 40, 1, 2)
    assert options(MASKS["dilated"])["spans"].limits.shape == (1, 1, 40, 7, 2)


def recognized(mod: Mod, mask: Mod | None = None, n_q: int = 24, n_k: int = 30) -> Any:
    q, k, _ = inputs(n_q, n_k)
    block_mask = None if mask is None else create_block_mask(mask, BATCH, HEADS, n_q, n_k, device="cpu")
    return score_mod.recognized(mod, block_mask, q, k, 1.0)


def test_what_becomes_of_score_mods() -> None:
    """Slopes for ALiBi, one number where one is enough, and a bias of as few axes as it depends on."""
    assert recognized(SCORES["scale"]) == {"scale": pytest.approx(2 / 3)}
    assert recognized(SCORES["softcap"]) == {"scale": 1.0, "softcap": 20.0}
    found = recognized(SCORES["alibi"], MASKS["causal"])
    assert found.keys() == {"scale", "band", "alibi"} and torch.equal(found["alibi"], SLOPES.double())
    assert recognized(SCORES["alibi"])["bias"].shape == (1, HEADS, 24, 30)  # it is not symmetric
    assert recognized(SCORES["symmetric alibi"])["alibi"].shape == (BATCH, HEADS)
    assert recognized(SCORES["of keys"])["bias"].shape == (1, 1, 1, 30)
    assert recognized(SCORES["number"])["bias"].shape == (1, 1, 1, 1)
    assert recognized(SCORES["causal"]) == {"scale": 1.0, "band": ft.Band(right=0)}
    found = recognized(SCORES["softcap, bias, alibi, causal"])
    assert found.keys() == {"scale", "softcap", "band", "bias"}


def test_slopes_where_neighbours_are_hidden() -> None:
    """Only what is visible counts: without neighbours there are no slopes to try, and a bias says it."""
    far = recognized(SCORES["symmetric alibi"], lambda b, h, i, j: (i - j).abs() > 2)
    assert far["bias"].shape == (BATCH, HEADS, 24, 30)
    agree(inputs(24, 30), SCORES["alibi"], lambda b, h, i, j: i > j + 2)
    after = recognized(SCORES["symmetric alibi"], lambda b, h, i, j: i < j)
    assert torch.equal(after["alibi"], recognized(SCORES["symmetric alibi"])["alibi"])
    some = recognized(SCORES["alibi"], lambda b, h, i, j: (i > 10) & (i >= j))
    assert torch.equal(some["alibi"], SLOPES.double())


def test_a_bias_is_not_rounded() -> None:
    """With 16-bit inputs it is float32: distances above 256 are not bfloat16."""
    q, k, v = (x.to(torch.bfloat16) for x in inputs(300, 600, dim=16))

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + (j - i) * 0.0371

    out, lse = flex_attention(q, k, v, mod, return_lse=True)
    want, want_lse = by_definition([x.double() for x in (q, k, v)], mod)
    assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mod", ["softcap", "alibi", "relative", "either"])
def test_dtypes(mod: str, dtype: torch.dtype) -> None:
    given = [x.to(dtype) for x in inputs(24, 50)]
    block_mask = create_block_mask(MASKS["by head"], None, HEADS, 24, 50, device="cpu")
    out, lse = flex_attention(*given, SCORES[mod], block_mask, return_lse=True)
    want, want_lse = by_definition([x.double() for x in given], mod=SCORES[mod], mask=MASKS["by head"])
    assert out.dtype == dtype and lse.dtype == torch.float32
    error = 64 * torch.finfo(dtype).eps
    assert_close(out.double(), want, rtol=error, atol=error)
    assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_sums_of_16_bits() -> None:
    """Tables are widened before they are added up."""
    table = TABLE.to(torch.bfloat16)
    mod: Mod = lambda s, b, h, i, j: (s + table[h, j] + 0.01 * table[0, i]) * 1.7  # noqa: E731
    given = [x.to(torch.bfloat16) for x in inputs(24, 30)]
    _, lse = flex_attention(*given, mod, return_lse=True)
    assert_close(lse, theirs.flex_attention(*given, mod, return_lse=True)[1], rtol=1e-5, atol=1e-5)


PRIMITIVES: dict[str, Callable[[int, int], Mod]] = {
    "causal": lambda a, c: lambda b, h, i, j: i + a >= j,
    "window": lambda a, c: lambda b, h, i, j: (i - j + c).abs() <= a,
    "blocks": lambda a, c: lambda b, h, i, j: i // (a + 1) >= j // (c + 1),
    "heads": lambda a, c: lambda b, h, i, j: j <= i + a * h,
    "batch": lambda a, c: lambda b, h, i, j: j < a * (b + 1),
    "dilated": lambda a, c: lambda b, h, i, j: (i + j) % (a + 1) != 0,
    "rows": lambda a, c: lambda b, h, i, j: i != a,
    "random": lambda a, c: (lambda x: lambda b, h, i, j: x[i, j])(
        torch.rand(20, 20, generator=torch.Generator().manual_seed(a)) < 0.5
    ),
}
STEPS: dict[str, Callable[[int, Mod], Mod]] = {
    "scale": lambda a, f: lambda s, *at: f(s, *at) * (a + 0.5),
    "bias": lambda a, f: lambda s, b, h, i, j: f(s, b, h, i, j) + TABLE[h, (i * a + j) % 128],
    "distance": lambda a, f: lambda s, b, h, i, j: f(s, b, h, i, j) - (i - j).abs() / (a + h + 1),
    "causal": lambda a, f: lambda s, b, h, i, j: torch.where(i + a >= j, f(s, b, h, i, j), -torch.inf),
    "either": lambda a, f: lambda s, b, h, i, j: torch.where(h < a, f(s, b, h, i, j), f(s, b, h, i, j) + a),
}


def composed(names: list[tuple[str, int, int]], unite: bool) -> Mod:
    parts = [PRIMITIVES[name](a, c) for name, a, c in names]
    mask: Mod = (theirs.or_masks if unite else theirs.and_masks)(*parts)
    return mask


numbers = st.integers(0, 9)
any_mask = st.none() | st.builds(
    composed,
    st.lists(st.tuples(st.sampled_from(sorted(PRIMITIVES)), numbers, numbers), min_size=1, max_size=3),
    st.booleans(),
)


@st.composite
def any_score_mod(draw: st.DrawFn) -> Mod | None:
    first: Mod = lambda s, b, h, i, j: s  # noqa: E731
    if draw(st.booleans()):
        cap = draw(st.integers(1, 9))
        first = lambda s, b, h, i, j: cap * torch.tanh(s / cap)  # noqa: E731
    for name, a in draw(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), numbers), max_size=3)):
        first = STEPS[name](a, first)
    return first


@settings(max_examples=60)
@given(
    any_mask, st.none() | any_score_mod(), st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, 2, 4]), numbers
)
@pytest.mark.filterwarnings("ignore:flex_attention. a dense mask")
def test_any_call(mask: Mod | None, mod: Mod | None, n_q: int, n_k: int, kv_heads: int, seed: int) -> None:
    given = inputs(n_q, n_k, kv_heads=kv_heads, seed=seed)
    agree(given, mod, mask, enable_gqa=kv_heads != HEADS)
    same_gradients(given, mod, mask)


class TestRefusedScoreMods:
    """Each by its reason, and with the options that there are."""

    LEARNED = torch.ones((), requires_grad=True)
    CASES: tuple[tuple[str, Mod], ...] = (
        ("before tanh", lambda s, b, h, i, j: torch.tanh(s + TABLE[h, j])),
        ("before tanh", lambda s, b, h, i, j: torch.tanh(torch.where(i >= j, s, -torch.inf))),
        ("two tanh", lambda s, b, h, i, j: torch.tanh(torch.tanh(s))),
        ("for some pairs only", lambda s, b, h, i, j: torch.where(h > 1, torch.tanh(s), s)),
        ("another number than -inf", lambda s, b, h, i, j: torch.where(i >= j, s, -1e9)),
        ("another number than -inf", lambda s, b, h, i, j: torch.where(h < 2, s, torch.where(i >= j, s, 0.0))),
        ("another number than -inf", lambda s, b, h, i, j: torch.where(h < 2, torch.where(i >= j, s, 0.0), s)),
        ("another number than -inf", lambda s, b, h, i, j: s.masked_fill(i < j, torch.finfo(s.dtype).min)),
        ("another number than -inf", lambda s, b, h, i, j: torch.where(j < 29, s, TABLE[0, 0])),
        ("comparison of scores", lambda s, b, h, i, j: torch.where(s > 0, s, -torch.inf)),
        ("comparison of scores", lambda s, b, h, i, j: torch.where(s == 3, s, s)),
        ("gt of scores", lambda s, b, h, i, j: torch.where(torch.gt(s, 30.0), 0.0, s)),
        ("combines the score with itself", lambda s, b, h, i, j: s * s),
        ("combines the score with itself", lambda s, b, h, i, j: s + torch.tanh(s)),
        ("pow of scores", lambda s, b, h, i, j: torch.pow(s, 2)),
        ("clamp of scores", lambda s, b, h, i, j: s.clamp(-5, 5)),
        ("sigmoid of scores", lambda s, b, h, i, j: torch.sigmoid(s)),
        ("exp of scores", lambda s, b, h, i, j: s.exp()),
        ("maximum of scores", lambda s, b, h, i, j: torch.maximum(s, TABLE[h, j])),
        ("detach of scores", lambda s, b, h, i, j: s.detach()),
        ("add_ of scores", lambda s, b, h, i, j: s.add_(1)),
        ("add_ of scores", lambda s, b, h, i, j: torch.zeros_like(TABLE[h, j]).add_(s)),
        ("add with alpha", lambda s, b, h, i, j: torch.add(TABLE[h, j], s, alpha=2)),
        ("sub with alpha", lambda s, b, h, i, j: torch.sub(TABLE[h, j], s, alpha=2)),
        ("rsub with alpha", lambda s, b, h, i, j: torch.rsub(s, TABLE[h, j], alpha=2)),
        ("divides by a score, or rounds to integers", lambda s, b, h, i, j: torch.div(TABLE[h, j], s)),
        ("divides by a score, or rounds to integers", lambda s, b, h, i, j: torch.div(s, 2, rounding_mode="floor")),
        ("bool of scores", lambda s, b, h, i, j: torch.where(s.bool(), s, 1.0)),
        ("is not a number", lambda s, b, h, i, j: (s + TABLE[h])[0]),
        ("complex numbers", lambda s, b, h, i, j: (s + 1j * TABLE[h, j]).real),
        ("rounds scores", lambda s, b, h, i, j: s.to(torch.bfloat16)),
        ("rounds scores", lambda s, b, h, i, j: s.float() + 1),
        ("multiply the query instead", lambda s, b, h, i, j: s * SLOPES[h]),
        ("multiply the query instead", lambda s, b, h, i, j: torch.tanh(s * (1 + (j == 29)))),
        ("multiply the query instead", lambda s, b, h, i, j: s / torch.where(i == 23, 2.0, 1.0)),
        ("by 0, inf or NaN", lambda s, b, h, i, j: s * 0),
        ("by 0, inf or NaN", lambda s, b, h, i, j: torch.tanh(s) * torch.inf),
        ("divides by zero", lambda s, b, h, i, j: s / 0),
        ("not above 0", lambda s, b, h, i, j: -torch.where(i >= j, s, -torch.inf)),
        ("inf or NaN to a hidden score", lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf) + torch.inf),
        ("does not depend on the score", lambda s, b, h, i, j: TABLE[h, j]),
        ("no gradient", lambda s, b, h, i, j: torch.tanh(s) * TestRefusedScoreMods.LEARNED),
        ("no gradient", lambda s, b, h, i, j: s / (TestRefusedScoreMods.LEARNED + h)),
        ("could not be followed", lambda s, b, h, i, j: s**2),
        ("could not be followed", lambda s, b, h, i, j: abs(s)),
    )

    @pytest.mark.parametrize(("words", "mod"), CASES)
    def test_by_name(self, words: str, mod: Mod) -> None:
        with pytest.raises(ft.errors.UnsupportedError, match=f"^score_mod: .*{words}.*softcap="):
            flex_attention(*inputs(24, 30), mod)

    def test_errors_of_the_function_itself(self) -> None:
        with pytest.raises(ZeroDivisionError):
            flex_attention(*inputs(4, 4), lambda s, b, h, i, j: s + 1 / 0)
        with pytest.raises(RuntimeError, match="vmap"):  # as in torch
            flex_attention(*inputs(4, 4), lambda s, b, h, i, j: s if i > j else -s)

    def test_what_is_hidden_does_not_matter(self) -> None:
        """Another factor, another number than -inf, and NaN, where the block mask hides."""
        causal = MASKS["causal"]
        agree(inputs(24, 30), lambda s, b, h, i, j: s * torch.where(i >= j, 0.5, SLOPES[h]), causal)
        agree(inputs(24, 30), lambda s, b, h, i, j: torch.where(i >= j, s, 7.0), causal)
        agree(inputs(24, 30), lambda s, b, h, i, j: s + torch.where(i >= j, TABLE[h, j], torch.nan), causal)
        with pytest.raises(ft.errors.UnsupportedError, match="query instead"):
            flex_attention(*inputs(24, 30), lambda s, b, h, i, j: s * torch.where(i >= j, 0.5, SLOPES[h]))

    def test_what_is_not_chosen_does_not_matter(self) -> None:
        agree(inputs(24, 30), lambda s, b, h, i, j: torch.where(i >= j, torch.where(i >= j, s, 7.0), s * 1))
        agree(inputs(24, 30), lambda s, b, h, i, j: torch.where(i >= j, s, torch.where(i < j, s + 1, 7.0)))

    def test_a_wrong_record_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second check, by real scores, refuses what the first has recorded wrongly."""
        monkeypatch.setitem(score_mod._OPERATIONS, "tanh", lambda x: x)
        with pytest.raises(ft.errors.UnsupportedError, match="results differ"):
            flex_attention(*inputs(4, 4), lambda s, b, h, i, j: torch.tanh(s))

    def test_a_bias_too_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(score_mod, "LARGEST", 24 * 30 * HEADS - 1)
        with pytest.raises(ft.errors.UnsupportedError, match="numbers for all pairs"):
            flex_attention(*inputs(24, 30), SCORES["relative"])
        flex_attention(*inputs(24, 30), SCORES["symmetric alibi"])
        flex_attention(*inputs(24, 30), SCORES["of keys"])


class TestLearned:
    @pytest.mark.parametrize("mask", [None, "by head", "some rows see nothing"])
    def test_a_table(self, mask: str | None) -> None:
        table = TABLE.clone().requires_grad_()
        seen = None if mask is None else MASKS[mask]
        given = inputs(20, 30, kv_heads=2)
        same_gradients(given, lambda s, b, h, i, j: s + table[h, i - j + 40] * 2, seen, (table,))
        same_gradients(given, lambda s, b, h, i, j: 4 * torch.tanh(s / 4) + table[h, j], seen, (table,))

    def test_slopes(self) -> None:
        """As a bias, because alibi has no gradient."""
        slopes = SLOPES.double().requires_grad_()
        same_gradients(inputs(20, 20), lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), None, (slopes,))

    def test_each_call_has_its_own_graph(self) -> None:
        """After a call without gradients, and twice with the same table."""
        table = TABLE.clone().requires_grad_()
        mod: Mod = lambda s, b, h, i, j: s + table[h, j]  # noqa: E731
        with torch.no_grad():
            flex_attention(*inputs(20, 30), mod)
        for _ in range(2):
            same_gradients(inputs(20, 30), mod, None, (table,))

    def test_training_steps(self) -> None:
        """The table is read anew in each step, and by each backward pass."""
        table = torch.zeros(HEADS, 30, dtype=torch.float64, requires_grad=True)

        def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + table[h, j]

        q, k, v = inputs(20, 30)
        for _ in range(3):
            out = flex_attention(q, k, v, mod)
            assert_close(out, by_definition((q, k, v), mod)[0])
            out.sum().backward()
            with torch.no_grad():
                flex_attention(q, k, v, mod)
                assert table.grad is not None
                table += 0.1 * table.grad
        assert table.abs().max() > 0


WINDOW = 3


class TestChanges:
    """What a function has captured may change between calls."""

    def changed(self, mod: Mod, change: Callable[[], Any]) -> None:
        q, k, v = inputs(20, 20)
        for _ in range(2):
            for _ in range(2):
                assert_close(flex_attention(q, k, v, mod), by_definition((q, k, v), mod)[0])
            change()
        assert_close(flex_attention(q, k, v, mod), by_definition((q, k, v), mod)[0])

    @pytest.mark.parametrize(
        "change",
        [
            lambda x: x.mul_(2),
            lambda x: x.data.mul_(2),
            lambda x: x.numpy().__imul__(2),
            lambda x: x.set_(x * 2),
        ],
    )
    def test_tensors(self, change: Mod) -> None:
        slopes = SLOPES.clone()
        self.changed(lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), lambda: change(slopes))

    def test_numbers(self) -> None:
        cap = 2.0

        def change() -> None:
            nonlocal cap
            cap *= 2

        self.changed(lambda s, b, h, i, j: cap * torch.tanh(s / cap), change)

    def test_globals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def change() -> None:
            monkeypatch.setitem(globals(), "WINDOW", WINDOW + 3)

        self.changed(lambda s, b, h, i, j: torch.where((i - j).abs() <= WINDOW, s, -torch.inf), change)

    def test_functions_lists_and_objects(self) -> None:
        state = type("State", (), {"window": 3})()
        names = {"windows": [3, 4]}
        array = np.array(3)

        def inner(i: Any, j: Any) -> Any:
            return (i - j).abs() <= names["windows"][1]

        def grow() -> None:
            names["windows"][1] += 3
            state.window += 3
            array[...] += 3

        self.changed(lambda s, b, h, i, j: torch.where(inner(i, j), s, -torch.inf), grow)
        self.changed(lambda s, b, h, i, j: torch.where((i - j).abs() <= state.window, s, -torch.inf), grow)
        self.changed(lambda s, b, h, i, j: torch.where((i - j).abs() <= int(array), s, -torch.inf), grow)

    def test_functions_inside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Globals that only an inner function names; and an object, which has no hash."""

        class Window:
            size = 3
            __hash__ = None  # type: ignore[assignment]

            def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                return torch.where((i - j).abs() <= self.size, s, -torch.inf)

        def change() -> None:
            monkeypatch.setitem(globals(), "WINDOW", WINDOW + 3)
            mod.size += 3

        mod = Window()
        near: Any = lambda *at: (lambda i, j: (i - j).abs() <= WINDOW)(*at)  # noqa: E731
        self.changed(lambda s, b, h, i, j: torch.where(near(i, j), s, -torch.inf), change)
        self.changed(mod, change)

    def test_tensors_on_a_device(self) -> None:
        """They are compared without reading them: a meta tensor stands for one on a GPU."""
        table = torch.empty(4, device="meta")
        mod: Mod = lambda s, b, h, i, j: s + table[h]  # noqa: E731
        captured = mods.Captured(mod)
        assert captured.is_unchanged(mod)
        table += 1
        assert not captured.is_unchanged(mod)
        captured = mods.Captured(mod)
        table = torch.empty(4, device="meta")
        assert not captured.is_unchanged(mod)
        with torch.inference_mode():
            table = torch.empty(4, device="meta")  # without a version
        with pytest.raises(mods.UnknownError):
            mods.Captured(mod)

    def test_what_becomes_unknown(self) -> None:
        window: Any = 3
        mask: Mod = lambda b, h, i, j: i - j < (window if type(window) is int else 4)  # noqa: E731
        captured = mods.Captured(mask)
        window = object()
        assert not captured.is_unchanged(mask)
        block_mask = create_block_mask(mask, None, None, 20, 30, device="cpu")
        window = 9  # it cannot be known that this is a change
        assert_close(
            flex_attention(*inputs(20, 30), block_mask=block_mask),
            by_definition(inputs(20, 30), mask=lambda b, h, i, j: i - j < 4)[0],
        )
        late: Mod = lambda b, h, i, j: i > later  # noqa: E731
        with pytest.raises(mods.UnknownError):
            mods.Captured(late)
        later = 3
        assert mods.Captured(late).is_unchanged(late)

    def test_partial_functions(self) -> None:
        slopes = SLOPES.clone()

        def mod(slopes: Any, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s - slopes[h] * (i - j).abs()

        self.changed(functools.partial(mod, slopes), lambda: slopes.mul_(2))

    def test_nothing_is_evaluated_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs = counted(monkeypatch, score_mod, "_recognize")
        slopes = SLOPES.clone()
        q, k, v = inputs(20, 20)
        a, b = (create_block_mask(MASKS[name], None, None, 20, 20, device="cpu") for name in ("causal", "window"))
        mod: Mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
        for block_mask, count in ((a, 1), (a, 1), (b, 2), (b, 2)):
            flex_attention(q, k, v, mod, block_mask)
            assert len(runs) == count
        flex_attention(q, k, v, mod, b, scale=2.0)
        assert len(runs) == 2
        for n in range(1, 11):
            flex_attention(q[:, :, :n], k, v, mod)
        assert len(runs) == 12 and len(score_mod._KNOWN[mod]) <= score_mod.MOST_KNOWN

    def test_of_block_masks(self) -> None:
        """torch would then disagree with itself: its blocks are of the old mask, its mask_mod is the new one."""
        lengths = LENGTHS.clone()
        mask: Mod = lambda b, h, i, j: j < lengths[b]  # noqa: E731
        ours, torchs = (
            x(mask, BATCH, None, 20, 30, device="cpu") for x in (create_block_mask, theirs.create_block_mask)
        )
        given = inputs(20, 30)
        first = flex_attention(*given, block_mask=torchs)
        lengths -= 9
        with pytest.raises(RuntimeError, match=r"create it again"):
            flex_attention(*given, block_mask=ours)
        found = flex_attention(*given, block_mask=torchs)
        assert not torch.equal(found, first)
        assert_close(found, by_definition(given, mask=mask)[0])


class TestBlockMask:
    @pytest.mark.parametrize("lead", [(BATCH, HEADS), (None, None), (1, HEADS)])
    @pytest.mark.parametrize("name", ["causal", "window", "by head", "documents", "all", "nothing", "dilated"])
    def test_blocks(self, name: str, lead: tuple[int | None, int | None]) -> None:
        """Of any size, at the ragged edge too."""
        for block in (16, (8, 20)):
            ours, wanted = (
                x(MASKS[name], *lead, 50, 57, device="cpu", BLOCK_SIZE=block)
                for x in (create_block_mask, theirs.create_block_mask)
            )
            assert ours.shape == wanted.shape and ours.BLOCK_SIZE == wanted.BLOCK_SIZE
            assert ours.numel() == wanted.numel() and ours.sparsity() == wanted.sparsity()
            assert torch.equal(ours.to_dense(), wanted.to_dense())
            assert ours.to_string() == wanted.to_string() and str(ours) == str(wanted)
            for a, b in zip(ours.as_tuple(), wanted.as_tuple(), strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            assert ours._adjust(30, 40).shape == wanted._adjust(30, 40).shape
            assert ours.mask_mod is MASKS[name]

    def test_ours_in_torchs_function(self) -> None:
        given = inputs(40, 50)
        block_mask = create_block_mask(MASKS["by head"], None, HEADS, 40, 50, device="cpu", BLOCK_SIZE=16)
        found = theirs.flex_attention(*given, block_mask=block_mask)
        assert_close(found, flex_attention(*given, block_mask=block_mask))

    @pytest.mark.parametrize("make", [create_block_mask, theirs.create_block_mask])
    def test_decoding(self, make: Mod) -> None:
        """A row of blocks, with a mask_mod for the position at which its query stands."""
        q, k, v = inputs(64, 64)
        whole = make(MASKS["causal"], BATCH, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        want = flex_attention(q, k, v, block_mask=whole)
        for at in (0, 17, 63):
            row = whole[:, :, at // 16]
            with pytest.raises(RuntimeError, match="slice"):
                flex_attention(q[:, :, at : at + 1], k, v, block_mask=row)
            row.mask_mod = lambda b, h, i, j, at=at: i + at >= j
            row.seq_lengths = (1, 64)
            assert row.shape == (BATCH, 1, 1, 64)
            found = flex_attention(q[:, :, at : at + 1], k, v, block_mask=row)
            assert_close(found, want[:, :, at : at + 1])

    @pytest.mark.parametrize("make", [create_block_mask, theirs.create_block_mask])
    def test_attributes_are_set_anew(self, make: Mod) -> None:
        """Each by itself, after a call; torch's own function sees it too."""
        block_mask = make(MASKS["by head"], BATCH, HEADS, 40, 50, device="cpu", BLOCK_SIZE=64)
        for lengths, mask in (
            ((40, 50), "by head"),
            ((40, 50), "some rows see nothing"),
            ((24, 50), "some rows see nothing"),
            ((24, 30), "some rows see nothing"),
        ):
            if block_mask.mask_mod is not MASKS[mask]:
                block_mask.mask_mod = MASKS[mask]
            if lengths != block_mask.seq_lengths:
                block_mask.seq_lengths = lengths
            given = inputs(*lengths)
            want = by_definition(given, mask=MASKS[mask])[0]
            assert_close(flex_attention(*given, block_mask=block_mask), want)
            assert_close(theirs.flex_attention(*given, block_mask=block_mask), want)

    def test_a_slice_of_too_few_rows(self) -> None:
        row = theirs.create_block_mask(MASKS["causal"], None, None, 64, 64, device="cpu", BLOCK_SIZE=16)[:, :, 1]
        row.mask_mod = MASKS["causal"]
        with pytest.raises(ft.ShapeError, match="expected blocks for its seq_lengths"):
            flex_attention(*inputs(64, 64), block_mask=row)

    def test_repr(self) -> None:
        block_mask = create_block_mask(theirs.noop_mask, None, None, 20, 30)
        assert repr(block_mask) == "BlockMask(shape=(1, 1, 20, 30), BLOCK_SIZE=(128, 128), mask_mod=noop_mask)"

    def test_copies(self) -> None:
        """They evaluate the mask_mod again, which may be another one in another process."""
        block_mask = create_block_mask(theirs.noop_mask, 2, None, 20, 30)
        for found in (copy.copy(block_mask), copy.deepcopy(block_mask), pickle.loads(pickle.dumps(block_mask))):
            assert found.shape == block_mask.shape and found.seen.options() == {}
        window = create_block_mask(MASKS["window"], None, None, 20, 30)
        assert copy.deepcopy(window).seen.options() == window.seen.options()

    def test_from_blocks(self) -> None:
        """As torch's, if the mask_mod says the same as the blocks."""
        wanted = theirs.create_block_mask(MASKS["causal documents"], 2, None, 40, 50, device="cpu", BLOCK_SIZE=16)
        blocks = (wanted.kv_num_blocks, wanted.kv_indices, wanted.full_kv_num_blocks, wanted.full_kv_indices)
        make = functools.partial(flex.BlockMask.from_kv_blocks, *blocks, BLOCK_SIZE=16, seq_lengths=(40, 50))
        found = make(mask_mod=MASKS["causal documents"])
        assert found.shape == wanted.shape and torch.equal(found.to_dense(), wanted.to_dense())
        given = inputs(40, 50)
        assert_close(flex_attention(*given, block_mask=found), flex_attention(*given, block_mask=wanted))
        with pytest.raises(ft.ShapeError, match="agrees with the blocks"):
            make()

    def test_slices(self) -> None:
        ours, wanted = (
            x(MASKS["by head"], BATCH, HEADS, 50, 57, device="cpu", BLOCK_SIZE=16)
            for x in (create_block_mask, theirs.create_block_mask)
        )
        for index in (0, (1, 2), (slice(0, 1), slice(1, 3)), (slice(None), 1, torch.tensor([1]))):
            a, b = ours[index], wanted[index]
            assert a.shape == b.shape and torch.equal(a.to_dense(), b.to_dense())
            with pytest.raises(RuntimeError, match="sliced BlockMask"):
                a.mask_mod(0, 0, 0, 0)

    def test_to_another_device(self) -> None:
        moved = create_block_mask(MASKS["causal documents"], None, None, 20, 20, device="cpu").to("meta")
        assert moved.device.type == "meta" and moved.seen.spans.limits.device.type == "meta"
        with pytest.raises(RuntimeError, match="meta"):
            flex_attention(*inputs(20, 20), block_mask=moved)
        dense = create_block_mask(MASKS["causal"], None, None, 20, 20, device="cpu")
        assert dense.to("cpu").seen.options() == dense.seen.options()

    def test_one_slab_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mask is never evaluated for all pairs at once, nor for heads on which it does not depend."""
        want = create_block_mask(MASKS["causal documents"], BATCH, HEADS, 40, 50, device="cpu").spans
        queries: list[int] = []

        def watched(function: Mod, b: Any, h: Any, i: Any, j: Any) -> Any:
            queries.append(len(b) * len(h) * len(i) if len(queries) else 0)
            return mods.on_pairs(function, b, h, i, j)

        monkeypatch.setattr(block_masks, "on_pairs", watched)
        monkeypatch.setattr(masks, "SLAB", 250)
        mask: Mod = lambda b, h, i, j: (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j])  # noqa: E731
        found = create_block_mask(mask, BATCH, HEADS, 40, 50, device="cpu").spans
        assert max(queries) == 5 and len(queries) == 9
        assert torch.equal(found.limits, want.limits)

    @pytest.mark.parametrize("slab", [1, 99, 1 << 22])
    def test_score_mods_in_slabs(self, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (masks, score_mod, block_masks):
            monkeypatch.setattr(module, "SLAB", slab)
        for name in ("alibi", "relative", "of keys", "either", "hidden by bias"):
            mod: Mod = lambda s, b, h, i, j, mod=SCORES[name]: mod(s, b, h, i, j)  # noqa: E731
            agree(inputs(9, 11), mod, MASKS["by head"])
        with pytest.raises(ft.errors.UnsupportedError, match="query instead"):
            flex_attention(*inputs(9, 11), lambda s, b, h, i, j: s * torch.where(i == 8, 2.0, 1.0))

    def test_more_than_eight_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mask: Mod = lambda b, h, i, j: (i + j) % 2 == 0  # noqa: E731
        with pytest.warns(UserWarning, match=r"a dense mask of 20 x 30.*15 for batch 0, head 0, query 0"):
            block_mask = create_block_mask(mask, BATCH, None, 20, 30, device="cpu")
        assert block_mask.seen.options()["mask"].shape == (1, 1, 20, 30) and block_mask.spans is None
        with pytest.warns(UserWarning, match="a dense mask"):
            agree(inputs(20, 30), SCORES["alibi"], mask)
        with pytest.warns(UserWarning, match="a dense mask"):
            agree(inputs(20, 30), lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s, -torch.inf), MASKS["causal"])
        monkeypatch.setattr(score_mod, "SLAB", 90)  # three queries at a time, of the right ones
        with pytest.warns(UserWarning, match="a dense mask"):
            agree(inputs(20, 30), lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s, 7.0), mask)
        monkeypatch.setattr(block_masks, "LARGEST", 20 * 30 - 1)
        with pytest.raises(ft.ShapeError, match=r"at most 8 runs.*15 for batch 0, head 0, query 0"):
            create_block_mask(mask, BATCH, None, 20, 30, device="cpu")

    def test_torchs_are_converted_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runs = counted(monkeypatch, block_masks, "seen_by")
        block_mask = theirs.create_block_mask(MASKS["documents"], None, None, 20, 30, device="cpu")
        given = inputs(20, 30)
        for count in (1, 1):
            flex_attention(*given, block_mask=block_mask)
            assert len(runs) == count
        block_mask.mask_mod = lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (j > 3)
        assert_close(
            flex_attention(*given, block_mask=block_mask), theirs.flex_attention(*given, block_mask=block_mask)
        )
        assert len(runs) == 2

    def test_blocks_that_disagree_with_the_function(self) -> None:
        """torch's kernels follow the blocks, its eager function only the mask_mod: neither is right."""
        one, zero = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
        for more in ((), (one, zero)):
            block_mask = theirs.BlockMask.from_kv_blocks(
                one if not more else one * 0, zero, *more, BLOCK_SIZE=16, mask_mod=None if not more else MASKS["window"]
            )
            with pytest.raises(ft.ShapeError, match="agrees with the blocks"):
                flex_attention(*inputs(32, 32), block_mask=block_mask)

    @pytest.mark.parametrize("mod", [lambda s, b, h, i, j: s, lambda b, h: b, 3])
    def test_wrong_functions(self, mod: Any) -> None:
        with pytest.raises((AssertionError, TypeError)) as wanted:
            theirs.create_block_mask(mod, 1, 1, 4, 4, device="cpu")
        with pytest.raises(wanted.type, match="mask_mod: expected a function"):
            create_block_mask(mod, 1, 1, 4, 4, device="cpu")

    def test_wrong_results(self) -> None:
        for function in (theirs.create_block_mask, create_block_mask):
            with pytest.raises(AssertionError, match="bool"):
                function(lambda b, h, i, j: i - j, 1, 1, 4, 4, device="cpu")

    def test_compile_is_deprecated(self) -> None:
        with pytest.warns(DeprecationWarning, match="_compile"):
            create_block_mask(MASKS["causal"], 1, 1, 4, 4, device="cpu", _compile=True)


class TestResults:
    def test_lse(self) -> None:
        given = inputs(20, 30)
        out, lse = flex_attention(*given, return_lse=True)
        again, aux = flex_attention(*given, return_aux=AuxRequest(lse=True))
        assert torch.equal(out, again) and torch.equal(lse, aux.lse) and aux.max_scores is None
        _, aux = flex_attention(*given, return_aux=AuxRequest())
        assert aux.lse is None
        assert isinstance(flex_attention(*given), torch.Tensor)

    def test_lse_is_deprecated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flex, "_warned", False)
        with pytest.warns(FutureWarning, match="AuxRequest"):
            flex_attention(*inputs(4, 4), return_lse=True)

    @pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
    def test_empty_sizes(self, size: tuple[int, int]) -> None:
        given = [x.requires_grad_() for x in inputs(*size)]
        block_mask = create_block_mask(MASKS["causal"], None, None, *size, device="cpu")
        for options in ({}, {"block_mask": block_mask}, {"score_mod": SCORES["alibi"]}):
            out, aux = flex_attention(*given, **options, return_aux=AuxRequest(lse=True))
            assert out.shape == given[0].shape and (out == 0).all()
            assert aux.lse is None if size[0] == 0 else (aux.lse == -torch.inf).all()
            out.sum().backward()

    def test_empty_batch(self) -> None:
        assert flex_attention(*inputs(4, 5, batch=0)).shape == (0, HEADS, 4, 8)

    @pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
    def test_layouts(self, order: tuple[int, ...]) -> None:
        """Any order of axes in memory, which the output takes from the query."""
        back = [order.index(axis) for axis in range(4)]
        given = [x.permute(order).contiguous().permute(back) for x in inputs(20, 30)]
        assert not given[0].is_contiguous()
        found = agree(given, SCORES["alibi"], MASKS["by head"])
        assert found.stride() == theirs.flex_attention(*given).stride()

    def test_one_key_batch_for_all_queries(self) -> None:
        q, k, v = inputs(20, 30)
        agree([q, k[:1], v[:1]], SCORES["relative"], MASKS["padding"])

    def test_inf_and_nan_in_hidden_values(self) -> None:
        q, k, v = inputs(20, 30)
        block_mask = create_block_mask(MASKS["causal"], None, None, 20, 30, device="cpu")
        want = flex_attention(q, k, v, block_mask=block_mask)
        k[:, :, 25:], v[:, :, 25:] = torch.nan, torch.inf
        assert torch.equal(flex_attention(q, k, v, block_mask=block_mask), want)

    def test_torch_as_it_is_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not compiled by the user, with the compilation that torch's function does by itself."""
        monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agree(inputs(24, 30, kv_heads=2), SCORES["alibi"], MASKS["by head"], enable_gqa=True)

    def test_autocast(self) -> None:
        given = [x.float() for x in inputs(20, 30)]
        with torch.autocast("cpu", torch.bfloat16):
            found, want = (f(*given, SCORES["alibi"]) for f in (flex_attention, theirs.flex_attention))
        assert found.dtype == want.dtype == torch.bfloat16
        assert_close(found, want, rtol=2e-2, atol=2e-2)


class TestCompiled:
    @pytest.mark.parametrize("mask", [None, "causal", "by head"])
    def test_whole_graph(self, mask: str | None) -> None:
        given = [x.requires_grad_() for x in inputs(20, 30, kv_heads=2)]
        block_mask = None if mask is None else create_block_mask(MASKS[mask], None, HEADS, 20, 30, device="cpu")

        def run(q: Any, k: Any, v: Any) -> Any:
            out, aux = flex_attention(
                q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True), scale=0.4
            )
            return out * 2, aux.lse

        found, wanted = torch.compile(run, fullgraph=True, backend="aot_eager")(*given), run(*given)
        assert_close(found, wanted)
        grads = [torch.autograd.grad(out.sum() + lse.cos().sum(), given) for out, lse in (found, wanted)]
        assert_close(*grads)

    def test_the_block_mask_as_an_argument(self) -> None:
        run: Any = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
        given = inputs(20, 30)
        for name in ("causal documents", "padding"):
            block_mask = create_block_mask(MASKS[name], BATCH, None, 20, 30, device="cpu")
            assert_close(run(*given, block_mask=block_mask), by_definition(given, mask=MASKS[name])[0])

    def test_a_score_mod_breaks_the_graph(self) -> None:
        def run(q: Any, k: Any, v: Any) -> Any:
            return flex_attention(q * 2, k, v, SCORES["alibi"]) + 1

        given = inputs(20, 30)
        assert_close(torch.compile(run, backend="aot_eager")(*given), run(*given))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="a score_mod cannot be recognized inside a graph"):
            torch.compile(run, backend="aot_eager", fullgraph=True)(*given)


def block_mask_of(module: Any, *shape: Any, mask: Mod = MASKS["causal"]) -> Any:
    return module.create_block_mask(mask, *shape, device="cpu")


WRONG: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "query of another head dim": lambda f, q, k, v: f.flex_attention(q[..., :4], k, v),
    "two axes": lambda f, q, k, v: f.flex_attention(q[0, 0], k[0, 0], v[0, 0]),
    "one axis": lambda f, q, k, v: f.flex_attention(q[0, 0, 0], k, v),
    "fewer key heads": lambda f, q, k, v: f.flex_attention(q, k[:, :2], v[:, :2]),
    "key heads that do not divide": lambda f, q, k, v: f.flex_attention(q, k[:, :3], v[:, :3], enable_gqa=True),
    "another batch": lambda f, q, k, v: f.flex_attention(q, k[:1], v[:1]),
    "another batch than the mask": lambda f, q, k, v: f.flex_attention(
        q, k[:1], v[:1], block_mask=block_mask_of(f, 1, None, 20, 30)
    ),
    "batches that do not broadcast": lambda f, q, k, v: f.flex_attention(
        q[:1].expand(4, -1, -1, -1), k, v, block_mask=block_mask_of(f, 4, None, 20, 30)
    ),
    "another device": lambda f, q, k, v: f.flex_attention(q, k.to("meta"), v),
    "values of other heads": lambda f, q, k, v: f.flex_attention(q, k, v[:, :2]),
    "values of another length": lambda f, q, k, v: f.flex_attention(q, k, v[:, :, :9]),
    "nested": lambda f, q, k, v: f.flex_attention(torch.nested.as_nested_tensor([*q], layout=torch.jagged), k, v),
    "a mask of more queries": lambda f, q, k, v: f.flex_attention(q, k, v, None, block_mask_of(f, 1, 1, 21, 30)),
    "a mask of fewer queries": lambda f, q, k, v: f.flex_attention(q, k, v, None, block_mask_of(f, 1, 1, 19, 30)),
    "a mask of more keys": lambda f, q, k, v: f.flex_attention(q, k, v, None, block_mask_of(f, 1, 1, 20, 31)),
    "a mask of fewer keys": lambda f, q, k, v: f.flex_attention(q, k, v, None, block_mask_of(f, 1, 1, 20, 29)),
    "a mask on another device": lambda f, q, k, v: f.flex_attention(
        q, k, v, None, block_mask_of(f, 1, 1, 20, 30).to("meta")
    ),
    "a slice of a mask": lambda f, q, k, v: f.flex_attention(q, k, v, None, block_mask_of(f, 1, 1, 20, 30)[0:1]),
    "two ways to ask for the lse": lambda f, q, k, v: f.flex_attention(
        q, k, v, return_lse=True, return_aux=AuxRequest(lse=True)
    ),
    "max_scores": lambda f, q, k, v: f.flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True)),
    "an unknown backend": lambda f, q, k, v: f.flex_attention(q, k, v, kernel_options={"BACKEND": "CUDNN"}),
    "two backends": lambda f, q, k, v: f.flex_attention(
        q, k, v, kernel_options={"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}
    ),
    "options of its own": lambda f, q, k, v: f.flex_attention(q, k, v, kernel_options={"OUTPUT_MAX": True}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """As torch does, before anything runs, and with an error of the same type."""
    given = inputs(20, 30)
    with pytest.raises(Exception) as wanted:
        WRONG[name](theirs, *given)
    assert wanted.type is not Exception
    with pytest.raises(wanted.type) as found:
        WRONG[name](flex, *given)
    assert ": expected" in str(found.value)


def test_kernel_options_have_no_effect() -> None:
    given = inputs(20, 30)
    options = {"BLOCK_M": 64, "PRESCALE_QK": True, "BACKEND": "TRITON"}
    assert torch.equal(flex_attention(*given, kernel_options=options), flex_attention(*given))


def test_mixed_dtypes_are_refused() -> None:
    q, k, v = inputs(20, 30)
    with pytest.raises(ValueError, match=r"^key: expected torch.float64, like query, got torch.float32"):
        flex_attention(q, k.float(), v)


def test_other_types_are_refused() -> None:
    q, k, v = inputs(20, 30)
    with pytest.raises(ft.DTypeError, match="value: expected a torch tensor, got NoneType"):
        flex_attention(q, k, None)
    with pytest.raises(ft.DTypeError, match="block_mask: expected a BlockMask, got Tensor"):
        flex_attention(q, k, v, block_mask=torch.ones(20, 30))
    with pytest.raises(ft.DTypeError, match="enable_gqa"):
        flex_attention(q, k, v, enable_gqa="yes")
    with pytest.raises(ft.DTypeError, match="score_mod: expected a function"):
        flex_attention(q, k, v, 3.0)


def test_large_heads_are_refused() -> None:
    with pytest.raises(ft.ShapeError, match=rf"^query: expected .*{MAX_DIM}"):
        flex_attention(*inputs(4, 4, dim=MAX_DIM + 1))


def test_a_mask_of_other_heads_is_refused() -> None:
    with pytest.raises(ft.ShapeError, match="block_mask: expected a batch of 1 or 2, and 1 or 4 heads, got 1 and 3"):
        flex_attention(*inputs(20, 30), block_mask=block_mask_of(flex, None, 3, 20, 30))
