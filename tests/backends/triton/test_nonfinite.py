"""NaN and Inf through the Triton kernels under the interpreter: the second walk, and who is given what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests import test_nonfinite as nonfinite
from tests.backends.triton import kernels
from tests.grid import Call, Truth, check_backward, check_forward, same_dtype_error

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(kernels.DEVICE == "cuda", reason="tests/gpu does this on the GPU"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.launch.tuning, "choose", lambda *_: kernels.launch.Config(32, 32, 4, 1))


def check(call: Call, exact: Truth, backward: bool = True) -> None:
    out, lse = kernels.forward(call)
    check_forward(call, exact, out, lse)
    if backward:
        check_backward(call, exact, kernels.backward(call, out, lse))


@pytest.mark.parametrize(
    ("hider", "dtype"), [("causal", "bfloat16"), ("kv_lengths", "float32"), ("everything", "float32")]
)
def test_hidden_things_have_no_effect(hider: str, dtype: str) -> None:
    call, seen = nonfinite.case("ragged", hider, dtype)
    hidden = list(nonfinite.hidden_places(call, seen))
    if "sink" in call.options:  # a row with a sink has an lse and an output, whatever it sees
        hidden = [(name, where) for name, where in hidden if name not in ("dout", "dlse")]
    clean = poisoned = call
    for n, (name, where) in enumerate(hidden):
        clean = nonfinite.changed(clean, name, where, 0.0)
        poisoned = nonfinite.changed(poisoned, name, where, list(nonfinite.POISON.values())[n % 3])
    check(poisoned, same_dtype_error(clean))


@pytest.mark.parametrize(("hider", "dtype"), [("causal", "bfloat16"), ("everything", "float32")])
@pytest.mark.parametrize("target", ["q", "k", "v", "dout"])
def test_visible_things_reach_those_who_see_them(target: str, hider: str, dtype: str) -> None:
    call, seen = nonfinite.case("ragged", hider, dtype)
    error = same_dtype_error(call).error
    seen_by = (0, 1) if target in "kv" else 1
    at = (seen[0, :2] if target in "kv" else seen[0, 0]).any(axis=seen_by).nonzero()[0]
    for value in (np.nan, np.inf):
        poisoned = nonfinite.changed(call, target, (0, 0, at[len(at) // 2], 3), value)
        exact = replace(same_dtype_error(poisoned), error=error)
        assert not all(np.isfinite(x).all() for x in (exact.out, *exact.grads.values()) if x is not None)
        check(poisoned, exact, backward=bool(np.isnan(value)))  # of 0 * Inf each order of sums has its own


@pytest.mark.parametrize("size", [1e3, -1e3, 1e30])
def test_scores_of_any_size(size: float) -> None:
    nonfinite.test_scores_of_any_size(19, 45, size, "float32", kernels)
    nonfinite.test_scores_of_any_size(1, 1001, size, "float32", kernels)  # the keys are split
