"""NaN and Inf through the Triton kernels under the interpreter: which tiles are flagged, and who recomputes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest

from flashtile.numerics.dtypes import narrow, widen
from tests import test_nonfinite as nonfinite
from tests.backends.triton import kernels
from tests.support.grid import Call, Case, Size, Truth, build, check_backward, check_forward, truth_of
from tests.support.large_scores import large_scores

torch = pytest.importorskip("torch")

from flashtile.backends.gpu import device as gpu  # noqa: E402
from flashtile.backends.gpu import nonfinite as recompute  # noqa: E402
from flashtile.backends.gpu import nonfinite_kernels, scratch  # noqa: E402
from flashtile.backends.gpu.config import Config  # noqa: E402
from flashtile.backends.gpu.kernel_launch import Argument  # noqa: E402
from flashtile.backends.gpu.scratch import Scratch  # noqa: E402
from flashtile.backends.gpu.tensors import laid_out  # noqa: E402
from flashtile.backends.triton import tuning  # noqa: E402
from flashtile.backends.triton.passes import Runner  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(kernels.DEVICE == "cuda", reason="tests/gpu does this on the GPU"),
]
# Processors: with 1, tiles are flagged for another kernel; with 1000, programs recompute their own rows.
RECOMPUTE, INSIDE = 1, 1000
TARGETS = ("q", "k", "v", "dout")  # one per sequence
LONG = Size(4, 2, 1, 37, 48, 16, 16)
DECODE = Size(4, 2, 1, 1, 270, 16, 16)
SMALL = Size(1, 2, 1, 34, 40, 8, 8)
PACKED = Size.packed(2, 1, 16, 16, (17, 30), (37, 45), (0, 9), (5, 40))
BAD = (slice(17, 54), slice(30, 75))  # queries and keys of its second sequence
OPTIONS = [
    (("causal",), "float32"),
    (("window", "sink"), "float16"),
    (("kv_lengths", "causal"), "float16"),
    pytest.param(("mask",), "bfloat16", marks=pytest.mark.slow),
    pytest.param(("causal", "dropout"), "float32", marks=pytest.mark.slow),
    pytest.param(("causal", "softcap", "alibi", "bias"), "float16", marks=pytest.mark.slow),
    (("everything",), "float16"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two careful ones each if the dtype is float32, and more flags than a program reads together."""
    monkeypatch.setattr(tuning, "choose", lambda *_: Config(32, 32, 4, 1))
    monkeypatch.setattr(nonfinite_kernels, "FLAGS_AT_ONCE", type(nonfinite_kernels.FLAGS_AT_ONCE)(4))


def processors(n: int) -> Any:
    return mock.patch.object(gpu, "processors", lambda _device: n)


def forward(call: Call, exact: Truth, where: int = RECOMPUTE) -> tuple[Any, Any]:
    with processors(where):
        out, lse = kernels.forward(call)
    check_forward(call, exact, out, lse)
    return out, lse


def check(call: Call, exact: Truth, backward: bool = True) -> None:
    """Check both ways to recompute a forward pass, and the one of a backward pass."""
    forward(call, exact, INSIDE)
    out, lse = forward(call, exact)
    if backward:
        with processors(RECOMPUTE):
            check_backward(call, exact, kernels.backward(call, out, lse))


@pytest.mark.parametrize(
    ("hider", "dtype"),
    [
        pytest.param("mask", "bfloat16", marks=pytest.mark.slow),
        ("band", "float16"),
        ("kv_lengths", "float16"),
        pytest.param("everything", "float32", marks=pytest.mark.slow),
    ],
)
def test_hidden_nan_has_no_effect(hider: str, dtype: str) -> None:
    call, seen = nonfinite.case("ragged", hider, dtype)
    hidden = list(nonfinite.hidden_places(call, seen))
    if "sink" in call.options:  # a row with a sink has an lse and an output, whatever it sees
        hidden = [(name, where) for name, where in hidden if name not in ("dout", "dlse")]
    clean = poisoned = call
    for n, (name, where) in enumerate(hidden):
        clean = nonfinite.changed(clean, name, where, 0.0)
        poisoned = nonfinite.changed(poisoned, name, where, list(nonfinite.POISON.values())[n % 3])
    check(poisoned, truth_of(clean))


def one_bad_number(
    size: Size, options: tuple[str, ...], dtype: str, value: float, targets: tuple[str, ...] = TARGETS
) -> tuple[Call, Truth]:
    """A call in which each sequence has one bad input, at a place that some rows see and others do not."""
    call = build(Case(size, dtype, options))
    if "kv_lengths" in call.options:
        call = replace(call, options=call.options | {"kv_lengths": np.array([size.n_k - 9, size.n_k, 20, 31])})
    error = truth_of(call).error
    group = nonfinite.by_key_head(nonfinite.visible(call), call)[:, 0]  # (batch, group, n_q, n_k)
    for b, target in enumerate(targets):
        seen = group[b].any(axis=(0, 1)) if target in "kv" else group[b, 0].any(axis=1)
        at = seen.nonzero()[0]
        call = nonfinite.changed(call, target, (b, 0, at[len(at) // 2], 3), value)
    return call, spoiled(call, error)


def spoiled(call: Call, error: dict[str, float]) -> Truth:
    """The oracle's results for a call with NaN or Inf, with the tolerance of the call without them."""
    exact = replace(truth_of(call), error=error)
    results = [exact.out, *(exact.grads[name] for name in ("dq", "dk", "dv"))]
    assert all(np.isfinite(x).any() for x in results) and not all(np.isfinite(x).all() for x in results)
    return exact


@pytest.mark.parametrize(("options", "dtype"), OPTIONS, ids=str)
def test_visible_nan_reaches_the_rows_that_see_it(options: tuple[str, ...], dtype: str) -> None:
    check(*one_bad_number(LONG, options, dtype, np.nan))


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("options", [("causal",), ("window", "dropout"), ("everything",)], ids="+".join)
def test_infinities_reach_the_rows_that_see_them(options: tuple[str, ...], value: float) -> None:
    """Forward alone: 0 * Inf depends on the order of sums."""
    check(*one_bad_number(LONG, options, "bfloat16", value), backward=False)


def test_an_infinite_query_or_key_under_a_softcap() -> None:
    """Scores are finite and have a slope of 0, so that the gradient of rows that see it is 0 * Inf."""
    call, exact = one_bad_number(LONG, ("causal", "softcap"), "float32", np.inf, ("q", "k"))
    assert np.isfinite(exact.out).all() and np.isnan(exact.grads["dq"]).any() and np.isnan(exact.grads["dk"]).any()
    check(call, exact)


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [("kv_lengths", "causal"), ("mask", "dropout"), ("everything",)], ids="+".join)
def test_split_decode(options: tuple[str, ...], value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "choose", lambda *_: Config(16, 32, 4, 1))
    call, exact = one_bad_number(DECODE, options, "float32", value)
    with processors(INSIDE):
        problem = laid_out(kernels.problem_of(call))
        assert Runner(problem).forward._splits > 1
    check(call, exact, backward=bool(np.isnan(value)) and options == ("everything",))


@pytest.mark.parametrize(
    ("splits", "options", "value"),
    [
        (32, ("kv_lengths", "sink"), np.nan),
        pytest.param(64, ("kv_lengths", "sink"), np.nan, marks=pytest.mark.slow),
        pytest.param(32, ("sink",), None, marks=pytest.mark.slow),
        pytest.param(64, ("sink",), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_short_decode(splits: int, options: tuple[str, ...], value: float | None, monkeypatch: Any) -> None:
    """Two programs per processor, a partial last tile, and with kv_lengths sequences that leave most shares empty."""
    short, usual = Config(16, 16, 2, 1, programs=2), Config(16, 16, 4, 1)
    monkeypatch.setattr(tuning, "choose", lambda kernel, *_: short if kernel == "decode-short" else usual)
    size = replace(DECODE, n_k=splits * 4 * 16 + 9)
    if value is None:
        call = build(Case(size, "float16", options))
        exact = truth_of(call)
    else:
        call, exact = one_bad_number(size, options, "float16", value)
    programs = splits * size.batch * size.kv_heads
    with processors(programs // 2):
        prepared = Runner(laid_out(kernels.problem_of(call))).forward
        assert prepared._splits == splits and prepared._kernel.grid[0] == programs and prepared._recompute is None
    forward(call, exact, programs // 2)


@pytest.mark.parametrize("options", [("causal",), ("kv_lengths",), ("window", "dropout", "sink")], ids="+".join)
def test_packed_neighbours(options: tuple[str, ...]) -> None:
    """One sequence is NaN, and so are the keys of others beyond kv_lengths, which must have no effect."""
    call = build(Case(PACKED, "float32", options))
    if "kv_lengths" in options:
        call = replace(call, options={"kv_lengths": np.array([20, 45, 9, 33])})
    exact = truth_of(call)
    poisoned = call
    for name in ("q", "dout", "dlse"):
        poisoned = nonfinite.changed(poisoned, name, BAD[0], np.nan)
    for name in ("k", "v"):
        for where in (BAD[1], *([slice(20, 30), slice(117, None)] if "kv_lengths" in options else [])):
            poisoned = nonfinite.changed(poisoned, name, where, np.nan)
    for where in (INSIDE, RECOMPUTE):
        with processors(where):
            out, lse = kernels.forward(poisoned)
        assert np.isnan(out[BAD[0]]).all() and np.isnan(lse[BAD[0]]).all()
        others = (nonfinite.put(x, BAD[0], right[BAD[0]]) for x, right in ((out, exact.out), (lse, exact.lse)))
        check_forward(call, exact, *others)
    with processors(RECOMPUTE):
        grads = kernels.backward(poisoned, out, lse)
    found: dict[str, Any] = {}
    for name, where in zip(("dq", "dk", "dv"), (BAD[0], BAD[1], BAD[1]), strict=True):
        assert np.isnan(getattr(grads, name)[where]).any()
        found[name] = nonfinite.put(getattr(grads, name), where, exact.grads[name][where])
    if grads.dsink is not None:
        found["dsink"] = exact.grads["dsink"].astype(np.float32)  # the bad sequence makes it NaN
    check_backward(call, exact, grads._replace(**found))


def test_a_bad_number_in_a_packed_sequence() -> None:
    """Each in a sequence of its own that begins within a tile: near the end of its keys, or early among its queries."""
    size = Size.packed(2, 1, 16, 16, (5, 9), (37, 45), (0, 3), (33, 41), (35, 38), (34, 40), (36, 39))
    call = build(Case(size, "float32", ("causal",)))
    error = truth_of(call).error
    for name, sequence, at in (("q", 1, 3), ("dout", 3, 2), ("v", 4, 35), ("k", 6, 36)):
        first = call.packed["cu_k" if name in "kv" else "cu_q"][sequence]
        call = nonfinite.changed(call, name, (first + at, 0, 3), np.nan)
    check(call, spoiled(call, error))


def test_large_doubles_are_not_infinite() -> None:
    call = build(Case(LONG, "float64", ("causal",)))
    big = nonfinite.changed(call, "v", (0, 0, 5, 3), 1e300)
    call = nonfinite.changed(big, "v", (0, 0, 5, 4), np.nan)
    out, _ = kernels.forward(call)
    right, _ = kernels.forward(big)
    np.testing.assert_allclose(out[..., :4], right[..., :4], rtol=1e-12)
    assert np.isnan(out[0, :, :, 4]).any()


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The flags of the calls in a test, initialized to 7; scratch memory of floats is initialized to NaN."""
    made: list[Any] = []

    def sevens(shape: tuple[int, ...], dtype: Any, device: Any) -> Callable[[], Any]:
        def make() -> Any:
            if dtype.is_floating_point:
                return torch.full(shape, torch.nan, dtype=dtype, device=device)
            made.append(torch.full(shape, 7, dtype=dtype, device=device))
            return made[-1]

        return make

    part = Scratch.part
    parts: list[Any] = []  # flags among the parts of the scratch memory

    def listen(self: Scratch, shape: tuple[int, ...], dtype: Any) -> Argument:
        found = part(self, shape, dtype)
        parts.extend([found] if dtype is torch.int32 else [])
        return found

    def spoilt(shape: tuple[int, ...], dtype: Any, device: Any) -> Callable[[], Any]:
        flags = parts.copy()
        parts.clear()

        def make() -> Any:
            memory = torch.full(shape, torch.nan, dtype=dtype, device=device)
            made.extend(each.of(memory).fill_(7) for each in flags)
            return memory

        return make

    monkeypatch.setattr(recompute, "empty", sevens)
    monkeypatch.setattr(Scratch, "part", listen)
    monkeypatch.setattr(scratch, "empty", spoilt)
    return made


def test_which_tiles_are_flagged(flags: list[Any]) -> None:
    """Index (sequence * heads + head) * tiles + tile; the tiles of rows 0.., 32.., 64.. are 0, 1, 2."""
    call = build(Case(Size(2, 4, 2, 70, 70, 16, 16), "float32", ("causal",)))
    bad = nonfinite.changed(call, "v", (1, 0, 40, 3), np.nan)
    with processors(RECOMPUTE):
        kernels.forward(bad)
        kernels.backward(nonfinite.changed(call, "k", (1, 0, 40, 3), np.nan), *kernels.forward(call))
    expected = np.zeros((2, 4, 3), np.int32)
    expected[1, :2, 1:] = 1
    np.testing.assert_array_equal(flags[0].reshape(2, 4, 3), expected)
    assert not flags[1].any()
    of_keys, of_queries = flags[2][:12].reshape(2, 2, 3), flags[2][12:].reshape(2, 4, 3)
    np.testing.assert_array_equal(of_queries, expected)
    np.testing.assert_array_equal(of_keys[0], 0)  # the given lse has no NaN: only the bad key itself has one
    np.testing.assert_array_equal(of_keys[1], [[0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("size", [LONG, PACKED], ids=str)
def test_finite_numbers_leave_no_flag(size: Size, flags: list[Any]) -> None:
    """Not even uninitialized memory does: row statistics are read beyond the last row."""
    call = build(Case(size, "float32", ("kv_lengths", "causal")))
    with processors(RECOMPUTE):
        kernels.backward(call, *kernels.forward(call))
    assert len(flags) == 2 and not any(x.any() for x in flags)


LARGE_SCORES = [
    (2.0**17, ("causal",), "float32"),
    (2.0**99, ("causal",), "float64"),
    (-(2.0**33), ("window", "bias"), "bfloat16"),
    (2.0**33, ("mask", "dropout", "sink"), "float32"),
    (2.0**99, ("kv_lengths", "causal"), "bfloat16"),
]


@pytest.mark.parametrize("case", LARGE_SCORES, ids=str)
def test_gradients_of_large_scores(case: tuple[float, tuple[str, ...], str]) -> None:
    call = large_scores(*case, SMALL)
    check(call, truth_of(call))


def test_gradients_of_large_scores_in_packed_sequences() -> None:
    call = large_scores(2.0**40, ("causal",), "float32", Size.packed(2, 1, 8, 8, (7, 9), (33, 20)))
    check(call, truth_of(call))


def test_large_scores_without_a_gradient_are_not_recomputed(flags: list[Any]) -> None:
    """Padding, often hidden by a bias of -1e9 for all keys of its rows."""
    call = build(Case(SMALL, "float32", ("bias",)))
    call = nonfinite.changed(call, "bias", (slice(None), slice(None), slice(20, None)), -1e9)
    idle = replace(call, dout=nonfinite.put(call.dout, (..., slice(20, None), slice(None)), 0.0), dlse=call.dlse * 0)
    with processors(RECOMPUTE):
        out, lse = kernels.forward(idle)
        grads = kernels.backward(idle, out, lse)
        check_backward(idle, truth_of(idle), grads)
        assert not flags[-1].any()
        kernels.backward(call, out, lse)
    assert flags[-1].any()


@cache
def hidden_by_the_lowest_number(dtype: str, shape: Size, *more: str) -> tuple[Call, Truth]:
    """A call with the lowest finite number as bias for all keys of every other row: in base 2 it would be infinite."""
    call = build(Case(shape, dtype, ("bias", *more)))
    least = float(torch.finfo(getattr(torch, dtype)).min)
    bias = np.zeros(call.options["bias"].shape)
    bias[..., ::2, :] = least
    options = call.options | {"bias": narrow(bias, dtype), "scale": 1.0}
    if "sink" in more:
        options["sink"] = narrow(np.array([least, 0.5]), dtype)
    k = np.round(widen(call.k, np.float64))  # scores that such a bias does not change
    call = replace(call, q=narrow(np.round(widen(call.q, np.float64)), dtype), k=narrow(k, dtype), options=options)
    return call, truth_of(call)


@pytest.mark.parametrize("more", [(), ("sink", "causal")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_rows_that_the_lowest_number_hides(dtype: str, more: tuple[str, ...]) -> None:
    """Numeric masks hide padding in this way: such rows are means of all their values, not empty."""
    check(*hidden_by_the_lowest_number(dtype, SMALL, *more))


def test_rows_that_the_lowest_number_hides_with_split_keys() -> None:
    check(*hidden_by_the_lowest_number("float32", Size(1, 2, 1, 1, 270, 8, 8), "sink"))


@pytest.mark.parametrize("n_q", [1, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_near_the_largest_number(dtype: str, n_q: int) -> None:
    """Their weighted mean is finite, although a sum of them is not."""
    call = build(Case(Size(1, 2, 1, n_q, 600, 16, 16), dtype))
    v = np.full(call.v.shape, 3.2e38)
    v[..., 1::2] = 1.0
    out, _lse = kernels.forward(replace(call, v=narrow(v, dtype)))
    np.testing.assert_allclose(widen(out, np.float64)[..., ::2], 3.2e38, rtol=1e-2 if dtype == "bfloat16" else 1e-5)
    np.testing.assert_allclose(widen(out, np.float64)[..., 1::2], 1.0, rtol=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("size", [1e3, pytest.param(-1e3, marks=pytest.mark.slow), 1e30])
def test_scores_of_any_size(size: float) -> None:
    nonfinite.test_scores_of_any_size(19, 45, size, "float32", kernels)
    nonfinite.test_scores_of_any_size(1, 1001, size, "float32", kernels)  # the keys are split
