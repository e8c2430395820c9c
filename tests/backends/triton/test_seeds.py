"""A seed given as a pointer: the kernels read it, and drop the same weights as for a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from tests.backends.triton.kernels import DEVICE, backward, forward, problem_of
from tests.support.grid import Call, Case, Size, build

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends import triton as portable  # noqa: E402
from flashtile.backends.gpu.arguments import rule, rule_of  # noqa: E402
from flashtile.inputs import Inputs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
SMALL = Size(2, 4, 2, 20, 33, 16, 16)
CALLS = {
    "causal": Case(SMALL, "float32", ("causal", "dropout")),
    "bias": Case(SMALL, "float32", ("bias", "dropout")),
    "everything": Case(SMALL, "float32", ("everything",)),
    "decode": Case(Size(1, 4, 2, 1, 600, 16, 16), "float32", ("dropout",)),
    "packed": Case(Size.packed(4, 2, 16, 16, (5, 9), (3, 7)), "float32", ("dropout",)),
}


def with_seed(call: Call, seed: Any) -> Call:
    return replace(call, options={**call.options, "dropout": 0.5, "seed": seed})


def tensor(seed: int) -> Any:
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device=DEVICE)


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        if b is not None:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_bits_of_a_number(name: str) -> None:
    call = build(CALLS[name])
    for seed in (5, 2**64 - 3):
        wanted = forward(with_seed(call, seed))
        for given in (tensor(seed), tensor(seed)[None]):
            same(forward(with_seed(call, given)), wanted)
    same(backward(with_seed(call, tensor(seed)), *wanted), backward(with_seed(call, seed), *wanted))
    with pytest.raises(AssertionError):
        same(forward(with_seed(call, tensor(6))), wanted)


@pytest.mark.parametrize("spoil", ["nan", "large"])
def test_recomputed_rows(spoil: str) -> None:
    """By the careful walk, in both passes."""
    call = build(CALLS["causal"])
    if spoil == "nan":
        v = call.v.copy()
        v[0, 0, 30, 0] = np.nan
        call = replace(call, v=v)
    else:
        call = replace(call, q=call.q * np.float32(2.0**30))
    wanted = forward(with_seed(call, 5))
    same(forward(with_seed(call, tensor(5))), wanted)
    same(backward(with_seed(call, tensor(5)), *wanted), backward(with_seed(call, 5), *wanted))


def test_a_prepared_call_reads_each_seed() -> None:
    call = build(CALLS["causal"])
    run, _ = portable.prepare(problem_of(with_seed(call, tensor(1))))
    for seed in (2, 3):
        out, _ = run.forward(Inputs.of(problem_of(with_seed(call, tensor(seed)))))
        same([out.cpu().numpy()], forward(with_seed(call, seed))[:1])
    changing = tensor(4)
    given = Inputs.of(problem_of(with_seed(call, changing)))
    before = run.forward(given)[0]
    changing.fill_(2)
    assert not torch.equal(before, run.forward(given)[0])


def test_a_number_is_passed_in_two_halves() -> None:
    """Kernels for a number do not change."""
    q = torch.empty(1, 2, 8, 8, device=DEVICE)

    def rules(seed: Any) -> Any:
        p = ft.problem.describe(q, q, q, dropout=0.5, seed=seed)
        return rule(p), rule_of(rule(p), Inputs.of(p))

    for one in rules(2**40 + 9):
        assert isinstance(one.seed_low, int) and isinstance(one.seed_high, int)
    seed = tensor(3)
    for one in rules(seed):
        assert one.seed_low is seed and one.seed_high is None
    p = ft.problem.describe(q, q, q)
    assert rule(p).seed_low is None and rule(p).seed_high == 0
