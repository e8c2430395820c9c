"""NaN and Inf: masked values have no effect; visible ones reach exactly the rows that see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.numerics.dtypes import narrow, widen
from tests.support.grid import GRADIENTS, Call, Case, Size, build, check_forward, max_error, truth_of
from tests.support.runners import Runner, api_runner, every_runner

SIZES = {
    "ragged": Size(2, 4, 2, 37, 53, 24, 16),
    "blocks": Size(1, 2, 1, 150, 170, 16, 24),
    "decode": Size(2, 4, 2, 1, 300, 32, 32),
    "few": Size(1, 8, 2, 3, 90, 16, 16),
}
HIDERS = {
    "mask": ("mask",),
    "causal": ("causal",),
    "window": ("window",),
    "band": ("band far ahead",),
    "kv_lengths": ("kv_lengths", "causal"),
    "spans": ("spans of rows", "causal"),
    "everything": ("everything",),
}
POISON = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
ORACLE = api_runner("reference")
each_size = pytest.mark.parametrize("size", SIZES)
each_hider = pytest.mark.parametrize("hider", HIDERS)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def visible(call: Call) -> Any:
    """Return which query sees which key, (batch, heads, n_q, n_k), by the definitions in the documentation."""
    B, H, n_q, _ = call.q.shape
    n_k, o = call.k.shape[2], call.options
    keys = np.asarray(o.get("kv_lengths", [n_k] * B))[:, None, None, None]
    i, j = np.arange(n_q)[:, None], np.arange(n_k)
    band = o.get("band")
    at = i + (band.offset if band else keys - n_q)
    left, right = (band.left, band.right) if band else o.get("window") or (None, None)
    seen = (j < keys) & np.ones((B, H, n_q, n_k), bool)
    if o.get("causal"):
        seen &= j <= at
    if left is not None:
        seen &= j >= at - left
    if right is not None:
        seen &= j <= at + right
    if "spans" in o:
        seen &= o["spans"].to_mask(n_k)
    return seen & o.get("mask", True)


def case(size: str, hider: str, dtype: str, bias: bool = True) -> tuple[Call, Any]:
    """Return a call with about half of its pairs hidden; some keys are seen by no query, some queries see no key."""
    options = HIDERS[hider] + (("bias",) if bias and hider != "everything" else ())
    call = build(Case(SIZES[size], dtype, options))
    if "mask" in call.options:
        mask = call.options["mask"].copy()
        mask[..., 5::7] = False
        if mask.shape[2] > 1:
            mask[:, :, 1::5] = False
        call = replace(call, options=call.options | {"mask": mask})
    return call, visible(call)


def put(x: Any, where: Any, value: float) -> Any:
    """Return a copy of x with a value at these places; bfloat16 too."""
    wide = widen(x, np.float64).copy()
    wide[where] = value
    return narrow(wide, "bfloat16") if x.dtype.names else wide.astype(x.dtype)


def changed(call: Call, name: str, where: Any, value: float) -> Call:
    if name in ("bias",):
        return replace(call, options=call.options | {name: put(call.options[name], where, value)})
    return replace(call, **{name: put(getattr(call, name), where, value)})


def everything(runner: Runner, call: Call) -> dict[str, Any]:
    out, lse = runner.forward(call)
    grads = runner.backward(call, out, lse)
    found = {"out": out, "lse": lse} | {name: getattr(grads, name) for name in GRADIENTS}
    return {name: widen(x, np.float64) for name, x in found.items() if x is not None}


def same(runner: Runner, found: Any, expected: Any, name: str) -> None:
    """Check for the same bits or, for a runner that passes such calls on, for numbers as close as 16 bits allow."""
    most = 0.0 if runner.same_bits else 0.05
    np.testing.assert_allclose(found, expected, rtol=most, atol=most, err_msg=name)


def by_key_head(seen: Any, call: Call) -> Any:
    """(batch, kv_heads, group, n_q, n_k)"""
    B, H, n_q, n_k = seen.shape
    kv = call.k.shape[1]
    return seen.reshape(B, kv, H // kv, n_q, n_k)


def hidden_places(call: Call, seen: Any) -> Iterator[tuple[str, Any]]:
    """Yield names of arrays, and the places in them that have no effect."""
    hidden_keys = ~by_key_head(seen, call).any(axis=(2, 3))
    empty_rows = ~seen.any(axis=3)
    for name in ("k", "v"):
        yield name, hidden_keys
    for name in ("q", "dout", "dlse"):
        yield name, empty_rows
    if "bias" in call.options:
        yield "bias", ~seen


@every_runner
@each_dtype
@each_hider
@each_size
@pytest.mark.parametrize("poison", POISON)
def test_hidden_values_have_no_effect(size: str, hider: str, dtype: str, poison: str, runner: Runner) -> None:
    """With NaN or Inf in all hidden places, results and gradients have the same bits as with zeros there."""
    call, seen = case(size, hider, dtype)
    clean = poisoned = call
    for name, where in hidden_places(call, seen):
        if name == "dlse" and "sink" in call.options:
            continue  # a row with a sink has an lse, whatever it sees
        clean, poisoned = changed(clean, name, where, 0.0), changed(poisoned, name, where, POISON[poison])
    if "sink" in call.options:  # and its output is 0 there, but dout * 0 is its gradient
        clean, poisoned = replace(clean, dout=call.dout), replace(poisoned, dout=call.dout)
    expected, found = everything(runner, clean), everything(runner, poisoned)
    for name, x in expected.items():
        assert np.isfinite(x).all() or name == "lse"
        same(runner, found[name], x, name)


@every_runner
@each_hider
@each_size
@pytest.mark.parametrize("target", ["k", "v", "q", "dout"])
@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_visible_values_reach_the_rows_that_see_them(
    size: str, hider: str, target: str, poison: str, runner: Runner
) -> None:
    """One bad number reaches the rows that see it and the keys of those rows, and nothing else."""
    call, seen = case(size, hider, "float32", bias=False)
    B, H, n_q, _ = seen.shape
    kv = call.k.shape[1]
    group = H // kv
    b, column = len(call.q) - 1, 3
    # A place that some rows see and others do not, as near to the middle as possible.
    count = by_key_head(seen, call)[b, 0].any(axis=0).sum(axis=0) if target in "kv" else seen[b, 0].sum(axis=1)
    if not count.any():
        pytest.skip("no row sees a key")
    at = min(np.flatnonzero(count).tolist(), key=lambda n: abs(n - len(count) // 2))
    where = (b, 0, at, column)
    bad_rows = np.zeros((B, H, n_q), bool)
    if target in ("k", "v"):
        bad_rows[b, :group] = seen[b, :group, :, at]
    else:
        bad_rows[b, 0, at] = True
    bad_keys = (by_key_head(seen, call) & bad_rows.reshape(B, kv, group, n_q, 1)).any(axis=(2, 3))

    clean = everything(runner, changed(call, target, where, 0.0))
    found = everything(runner, changed(call, target, where, POISON[poison]))
    none = np.zeros((B, H, n_q), bool)
    only = np.arange(call.v.shape[3]) == column
    touched = {
        "out": {"k": bad_rows[..., None], "q": bad_rows[..., None], "v": bad_rows[..., None] & only}.get(
            target, none[..., None]
        ),
        "lse": bad_rows if target in "kq" else none,
        "dq": bad_rows[..., None],
        "dk": bad_keys[..., None],
        "dv": bad_keys[..., None] & (only if target == "dout" else True) & (target != "v"),
    }
    if "bias" in call.options:
        touched["dbias"] = seen & bad_rows[..., None]
    if "sink" in call.options:
        touched["dsink"] = bad_rows.any(axis=(0, 2))
    for name, may in touched.items():
        may = np.broadcast_to(may, clean[name].shape)
        rows = may.any(axis=-1, keepdims=True) if name in ("out", "dq", "dk", "dv") else may
        rows = np.broadcast_to(rows, may.shape)
        same(runner, found[name][~rows], clean[name][~rows], f"{name} where it is not seen")
        beside = rows & ~may  # other columns of a row: the same numbers, perhaps summed in another order
        np.testing.assert_allclose(found[name][beside], clean[name][beside], atol=2e-6, err_msg=f"{name} next to it")
        if poison == "nan" and "dropout" not in call.options:
            assert np.isnan(found[name][may]).all(), f"{name} where it is seen"
    # Where it is seen, compare with the oracle: an infinite score makes weights of 0 or NaN.
    exact = truth_of(changed(call, target, where, POISON[poison]))
    names = ("out", "lse") if poison == "inf" else touched
    for name in names:
        np.testing.assert_array_equal(np.isfinite(found[name]), np.isfinite(exact.exact(name)), name)


@every_runner
@each_dtype
def test_packed_neighbours_and_unused_keys(dtype: str, runner: Runner) -> None:
    """A sequence of NaN affects no other sequence, and keys beyond kv_lengths affect nothing."""
    size = Size.packed(4, 2, 24, 16, (17, 30), (20, 25), (5, 40))
    for options in ("causal",), ("kv_lengths",), ("dropout",), ("window", "sink"):
        call = build(Case(size, dtype, options))
        if "kv_lengths" in call.options:
            call = replace(call, options={"kv_lengths": np.array([30, 0, 33])})
        q, k = np.zeros(42, bool), np.zeros(95, bool)
        q[17:37] = k[30:55] = True
        k[88:] = "kv_lengths" in call.options
        clean = poisoned = call
        for name in ("q", "dout", "dlse"):
            poisoned = changed(poisoned, name, q, np.nan)
        for name in ("k", "v"):
            clean, poisoned = changed(clean, name, k, 0.0), changed(poisoned, name, k, np.nan)
        expected, found = everything(runner, clean), everything(runner, poisoned)
        for name in ("out", "lse", "dq"):
            np.testing.assert_array_equal(found[name][~q], expected[name][~q], name)
        for name in ("dk", "dv"):
            np.testing.assert_array_equal(found[name][~k], expected[name][~k], name)


@every_runner
@each_dtype
@each_size
def test_a_bias_of_minus_infinity_is_a_mask(size: str, dtype: str, runner: Runner) -> None:
    call = build(Case(SIZES[size], dtype, ("mask with empty rows",)))
    mask = call.options["mask"]
    masked = everything(runner, call)
    bias = narrow(np.where(mask, 0.0, -np.inf), dtype)
    biased = everything(runner, replace(call, options={"bias": bias}))
    assert not biased["out"][:, :, ::3].any() and np.isneginf(biased["lse"][:, :, ::3]).all()
    assert not biased["dq"][:, :, ::3].any()
    for name, x in masked.items():
        np.testing.assert_allclose(biased[name], x, atol=2e-6 if dtype == "float32" else 0.05, err_msg=name)
    assert not biased["dbias"][~mask].any()


@every_runner
@each_hider
@each_size
def test_a_weight_of_0_is_no_mask(size: str, hider: str, runner: Runner) -> None:
    """If a bias leaves no weight to any key of a row, a visible NaN among their values still reaches it."""
    call, seen = case(size, hider, "float32")
    call = changed(call, "bias", np.s_[..., ::2, :], -np.inf)
    place = np.zeros(call.v.shape[:3], bool)
    place[..., 4::19] = True
    group = call.q.shape[1] // call.k.shape[1]
    reached = (seen & np.repeat(place, group, 1)[:, :, None]).any(3)
    expected, found = (everything(r, changed(call, "v", place, np.nan)) for r in (ORACLE, runner))
    np.testing.assert_array_equal(np.isnan(found["out"]).all(3), reached)
    for name, x in expected.items():
        np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(x), name)


@every_runner
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", [1e3, 1e30, -1e3, -1e30])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 300), (3, 40), (70, 130)])
def test_scores_of_any_size(n_q: int, n_k: int, size: float, dtype: str, runner: Runner) -> None:
    """Scores are -size, 0 or size: the output is the mean of the values of the largest visible scores."""
    if dtype == "float16" and abs(size) > 6e4:
        pytest.skip("float16 has no such number")
    rng = np.random.default_rng(4)
    pattern = rng.integers(-1, 2, n_k)
    q, k = np.ones((1, 2, n_q, 1)), (pattern * size).reshape(1, 1, n_k, 1)
    v, dout = rng.standard_normal((1, 1, n_k, 8)), rng.standard_normal((1, 2, n_q, 8))
    q, k, v, dout = (narrow(x, dtype) for x in (q, k, v, dout))
    dlse = np.zeros((1, 2, n_q), "float64" if dtype == "float64" else "float32")
    call = Call(q, k, v, {"causal": True, "scale": 1.0}, dout, dlse)
    out, lse = runner.forward(call)
    grads = runner.backward(call, out, lse)
    check_forward(call, truth_of(call), out, lse)
    at = np.arange(n_q) + n_k - n_q
    scores = widen(k, np.float64)[0, 0, :, 0]
    for i in range(n_q):
        seen = scores[: at[i] + 1]
        best = seen == seen.max()
        assert lse[0, 0, i] == pytest.approx(seen.max() + np.log(best.sum()), rel=1e-6)
        exact = widen(v, np.float64)[0, 0, : at[i] + 1][best].mean(axis=0)
        assert max_error(out[0, 0, i], exact) < {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-5)
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(widen(getattr(grads, name))).all(), name


@every_runner
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_softcap_and_bias_of_any_size(size: float, runner: Runner) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (20, 33, 33))
    bias = (rng.integers(-1, 2, (20, 33)) * size).astype(np.float32)
    for options in ({"softcap": 2.0, "scale": size}, {"bias": bias}, {"softcap": 1e-3}, {"softcap": 1e30}):
        call = Call(q, k, v, options, np.ones((1, 2, 20, 8), np.float32), np.ones((1, 2, 20), np.float32))
        exact = truth_of(call)
        out, lse = runner.forward(call)
        check_forward(call, exact, out, lse)
        for name, x in runner.backward(call, out, lse)._asdict().items():
            assert x is None or np.isfinite(x).all(), name


@every_runner
def test_sinks_of_any_size(runner: Runner) -> None:
    """A sink far above every score takes all; one far below takes nothing."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((1, 3, n, 8)).astype(np.float32) for n in (20, 33, 33))
    sink = np.array([1e30, -1e30, -np.inf], np.float32)
    call = Call(q, k, v, {"sink": sink}, np.ones((1, 3, 20, 8), np.float32), np.zeros((1, 3, 20), np.float32))
    out, lse = runner.forward(call)
    plain = ft.standard_attention(q, k, v)
    assert not out[0, 0].any() and (lse[0, 0] == np.float32(1e30)).all()
    np.testing.assert_allclose(out[0, 1:], plain[0, 1:], atol=1e-6)
    grads = runner.backward(call, out, lse)
    assert not grads.dq[0, 0].any() and np.isfinite(grads.dq).all() and not grads.dsink.any()


@pytest.mark.parametrize("where", ["q", "k", "bias"])
@pytest.mark.parametrize("n_q", [1, 40])
@pytest.mark.parametrize("bits", [0x7FC00001, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FF00000000007A2, 2**64 - 1])
def test_a_nan_of_any_bits(bits: int, n_q: int, where: str) -> None:
    """R marks missing values by one of these, and memory filled with ones is another."""
    nan = np.array(bits, np.uint32).view(np.float32) if bits < 2**32 else np.array(bits, np.uint64).view(np.float64)
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((1, 2, n, 8)).astype(nan.dtype) for name, n in (("q", n_q), ("k", 40), ("v", 40))
    }
    arrays["bias"] = np.zeros((1, 2, n_q, 40), nan.dtype)
    arrays[where][0, 0, 0, 0] = nan
    out, lse = ft.attention(**arrays, return_lse=True)
    seen = slice(None) if where == "k" else 0
    assert np.isnan(out[0, 0, seen]).all() and np.isnan(lse[0, 0, seen]).all()
    assert np.isfinite(out[0, 1]).all()
    grads = ft.attention_backward(np.ones_like(out), out=out, lse=lse, **arrays)
    assert np.isnan(grads.dq[0, 0, seen]).all() and np.isnan(grads.dk[0, 0]).all() and np.isfinite(grads.dq[0, 1]).all()
