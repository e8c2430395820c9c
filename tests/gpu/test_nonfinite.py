"""NaN and Inf on a GPU: hidden or unused ones have no effect; visible ones reach the rows that see them.

Results are compared with the oracle's numbers, not with the bits of a call without NaN: rows that meet one are
with_bad_replaced with other tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests import test_nonfinite as nonfinite
from tests.backends.triton.test_nonfinite import (
    LARGE_SCORES,
    hidden_by_the_lowest_number,
    large_scores,
    one_bad_number,
)
from tests.gpu.runner import CUDA, check, each_backend, refusal
from tests.support.grid import Call, Case, Size, Truth, build, check_backward, check_forward, truth_of

pytestmark = [pytest.mark.gpu, *each_backend]

PAIRLESS = ("causal window", "alibi", "softcap", "sink", "kv_lengths")  # everything but what is given for each pair


def hiding(size: str, hider: str, dtype: str, backend: str) -> tuple[Call, Any]:
    """nonfinite.case(), with only the options that a backend takes."""
    if backend != "gluon":
        return nonfinite.case(size, hider, dtype)
    if hider != "everything":
        return nonfinite.case(size, hider, dtype, bias=False)
    call = build(Case(nonfinite.SIZES[size], dtype, PAIRLESS))
    return call, nonfinite.visible(call)


each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


@pytest.mark.parametrize(
    ("hider", "dtype"),
    [*((hider, "bfloat16") for hider in nonfinite.HIDERS), ("causal", "float32"), ("everything", "float32")],
)
@pytest.mark.parametrize("size", ["blocks", "decode"])
def test_hidden_nan_has_no_effect(size: str, hider: str, dtype: str, backend: str) -> None:
    call, seen = hiding(size, hider, dtype, backend)
    if reason := refusal(call):
        pytest.skip(reason)
    clean = call
    hidden = list(nonfinite.hidden_places(call, seen))
    if "sink" in call.options:  # a row with a sink has an lse and an output, whatever it sees
        hidden = [(name, where) for name, where in hidden if name not in ("dout", "dlse")]
    for name, where in hidden:
        clean = nonfinite.changed(clean, name, where, 0.0)
    exact = truth_of(clean)
    assert all(np.isfinite(x).all() for x in exact.grads.values() if x is not None)
    for value in nonfinite.POISON.values():
        poisoned = call
        for name, where in hidden:
            poisoned = nonfinite.changed(poisoned, name, where, value)
        check(poisoned, exact)


@each_dtype
@pytest.mark.parametrize("hider", ["causal", "everything"])
@pytest.mark.parametrize("size", ["blocks", "decode"])
def test_visible_nan_reaches_the_rows_that_see_it(size: str, hider: str, dtype: str, backend: str) -> None:
    """One bad number in the middle of an input: the oracle's results, NaN by NaN, and no effect elsewhere."""
    call, seen = hiding(size, hider, dtype, backend)
    if reason := refusal(call):
        pytest.skip(reason)
    error = truth_of(call).error
    rows = seen[0, 0].any(axis=1).nonzero()[0]
    keys = seen[0, : call.q.shape[1] // call.k.shape[1]].any(axis=(0, 1)).nonzero()[0]
    for target, at in (("q", rows), ("dout", rows), ("k", keys), ("v", keys)):
        for value in (np.nan, np.inf):
            poisoned = nonfinite.changed(call, target, (0, 0, at[len(at) // 2], 3), value)
            exact = replace(truth_of(poisoned), error=error)
            assert not all(np.isfinite(x).all() for x in (exact.out, *exact.grads.values()) if x is not None)
            check(poisoned, exact, backward=bool(np.isnan(value)))  # 0 * Inf depends on the order of sums


@pytest.mark.parametrize(("option", "dim"), [("causal", 64), ("causal", 128), ("causal", 256), ("everything", 64)])
@pytest.mark.parametrize("heads", [(2, 1), (8, 4)], ids=["few programs", "many programs"])
def test_long_sequences(heads: tuple[int, int], option: str, dim: int) -> None:
    """Keys come by the copy engine. Few programs recompute their own rows; many leave that to another kernel."""
    check(*one_bad_number(Size(4, *heads, 577, 641, dim, dim), (option,), "bfloat16", np.nan))


@each_dtype
@pytest.mark.parametrize("lengths", [(65, 129), (3, 701)], ids=["tiles", "split keys"])
def test_neighbouring_heads_and_sequences(lengths: tuple[int, int], dtype: str) -> None:
    """One key head of one sequence is all NaN, and so are the query heads that it serves."""
    size = Size(2, 4, 2, *lengths, 64, 64)
    call = build(Case(size, dtype, ("causal",)))
    exact = truth_of(call)
    for b, h in ((0, 1), (1, 0)):
        poisoned = call
        for name in ("q", "dout", "dlse"):
            poisoned = nonfinite.changed(poisoned, name, (b, slice(2 * h, 2 * h + 2)), np.nan)
        for name in ("k", "v"):
            poisoned = nonfinite.changed(poisoned, name, (b, h), np.nan)

        def spoiled(x: Any, heads: slice, b: int = b) -> Any:
            x = x.copy()
            x[b, heads] = np.nan
            return x

        of_q, of_k = slice(2 * h, 2 * h + 2), slice(h, h + 1)
        grads = {name: spoiled(x, of_q if name == "dq" else of_k) for name, x in exact.grads.items() if x is not None}
        against = Truth(
            spoiled(exact.out, of_q), spoiled(exact.lse, of_q), dict.fromkeys(exact.grads) | grads, exact.error
        )
        check(poisoned, against)


@each_dtype
def test_unused_keys_of_split_decode(dtype: str) -> None:
    """A cache's contents beyond kv_lengths have no effect, whichever share of the keys they are in."""
    call = build(Case(Size(3, 8, 4, 1, 1999, 64, 64), dtype, ("causal",)))
    lengths = np.array([300, 1999, 0])
    call = replace(call, options=call.options | {"kv_lengths": lengths})
    unused = np.arange(1999) >= lengths[:, None, None] + np.zeros((1, 4, 1), int)
    clean = poisoned = call
    for name in ("k", "v"):
        clean, poisoned = nonfinite.changed(clean, name, unused, 0.0), nonfinite.changed(poisoned, name, unused, np.nan)
    check(poisoned, truth_of(clean))


@each_dtype
@pytest.mark.parametrize("option", ["causal", "kv_lengths"])
def test_packed_neighbours(option: str, dtype: str) -> None:
    """One sequence is NaN, and so are keys beyond kv_lengths; the others are unaffected."""
    call = build(Case(Size.packed(4, 2, 64, 64, (17, 30), (70, 75), (5, 140)), dtype, (option,)))
    bad_q, bad_k = slice(17, 87), slice(30, 105)
    if option == "kv_lengths":
        call = replace(call, options={"kv_lengths": np.array([30, 60, 133])})
    exact = truth_of(call)
    poisoned = call
    for name in ("q", "dout", "dlse"):
        poisoned = nonfinite.changed(poisoned, name, bad_q, np.nan)
    for name in ("k", "v"):
        poisoned = nonfinite.changed(poisoned, name, bad_k, np.nan)
        if option == "kv_lengths":
            poisoned = nonfinite.changed(poisoned, name, slice(105 + 133, None), np.nan)
    out, lse = CUDA.forward(poisoned)
    grads = CUDA.backward(poisoned, out, lse)

    def with_bad_replaced(x: Any, where: slice, right: Any) -> Any:
        """The results, with those of the bad sequence, which is not checked here, replaced by the right ones."""
        return nonfinite.put(x, where, right[where])

    check_forward(call, exact, with_bad_replaced(out, bad_q, exact.out), with_bad_replaced(lse, bad_q, exact.lse))
    right = {"dq": bad_q, "dk": bad_k, "dv": bad_k}
    found = {name: with_bad_replaced(getattr(grads, name), where, exact.grads[name]) for name, where in right.items()}
    check_backward(call, exact, grads._replace(**found))


@each_dtype
def test_a_bias_of_minus_infinity_is_a_mask(dtype: str) -> None:
    for size in ("blocks", "decode"):
        nonfinite.test_a_bias_of_minus_infinity_is_a_mask(size, dtype, CUDA)


@pytest.mark.parametrize("size", [1e3, 1e30, -1e3, -1e30])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_scores_of_any_size(dtype: str, size: float) -> None:
    for n_q, n_k in ((71, 131), (1, 1501)):
        nonfinite.test_scores_of_any_size(n_q, n_k, size, dtype, CUDA)


@pytest.mark.parametrize("case", LARGE_SCORES, ids=str)
@pytest.mark.parametrize("shape", [Size(2, 4, 2, 150, 200, 64, 64), Size(1, 2, 1, 300, 300, 128, 128)], ids=str)
def test_gradients_of_large_scores(shape: Size, case: tuple[float, tuple[str, ...], str]) -> None:
    call = large_scores(*case, shape)
    if reason := refusal(call):
        pytest.skip(reason)
    check(call, truth_of(call))


@pytest.mark.parametrize("more", [(), ("sink", "causal")], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [Size(1, 2, 1, 150, 200, 64, 64), Size(1, 2, 1, 1, 3000, 64, 64)], ids=str)
def test_rows_that_the_lowest_number_hides(shape: Size, dtype: str, more: tuple[str, ...]) -> None:
    call, exact = hidden_by_the_lowest_number(dtype, shape, *more)
    if reason := refusal(call):
        pytest.skip(reason)
    check(call, exact)


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_softcap_and_bias_of_any_size(size: float) -> None:
    nonfinite.test_softcap_and_bias_of_any_size(size, CUDA)


def test_sinks_of_any_size() -> None:
    nonfinite.test_sinks_of_any_size(CUDA)
