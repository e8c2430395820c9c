"""No access out of bounds: inputs lie between NaN, and results are initialized to NaN and lie between NaN."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.gpu.placement import FENCE, canaries
from tests.gpu.runner import Given, agree, each_backend, on, refusal
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.support.grid import Case, Size, build

pytestmark = [pytest.mark.gpu, *each_backend]

BROADCAST = ("window", "bias of keys", "bias of rows", "mask of rows", "sink", "spans of rows", "spans of batch")
CASES = [
    *(
        Case(size, "bfloat16", (option,))
        for size in (LONG, RAGGED, DECODE, PACKED)
        for option in ("causal", "everything")
    ),
    *(Case(size, "bfloat16", ("spans",)) for size in (LONG, RAGGED, DECODE, PACKED)),
    *(Case(RAGGED, "bfloat16", (option,)) for option in BROADCAST),
    *(Case(size, "float32", ("causal",)) for size in (RAGGED, PACKED)),
    Case(Size(1, 2, 1, 1, 1, 64, 64), "bfloat16"),
    Case(Size(2, 2, 1, 577, 641, 128, 128), "bfloat16", ("causal",)),
    Case(Size(1, 2, 1, 127, 129, 80, 33), "bfloat16", ("causal",)),
    Case(Size(2, 4, 2, 65, 129, 1, 1), "bfloat16", ("causal",)),
    Case(Size(2, 2, 1, 577, 641, 512, 512), "bfloat16", ("causal",)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_between_poison(case: Case) -> None:
    """Every input lies between NaN (lengths: the largest integers; masks: True), and none of it is written."""
    agree(case, runner=on("cuda", FENCE))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_between_poison(case: Case) -> None:
    """New memory is NaN and lies between NaN: all of a result is written, and nothing next to it."""
    call = build(case)
    if reason := refusal(call):
        pytest.skip(reason)
    given = Given(call, "cuda")
    with canaries() as birds:
        out, lse = given.forward()
        again, lse_again, *grads = given.step()
    assert birds.caught(out) and birds.caught(lse), "the results were not allocated where this test could see it"
    assert birds.untouched(), "something beside a new tensor was written"
    for name, x in {"out": out, "lse": lse, "out again": again, "lse again": lse_again}.items():
        assert not x.isnan().any(), f"{name} has elements that nobody wrote"
    for name, x in zip(given.leaves, grads, strict=True):
        assert not x.isnan().any(), f"{name} has elements that nobody wrote"
        assert name in ("dbias", "dsink") or birds.caught(x), name
