"""The same bits on every run, while the GPU does other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from tests.gpu.placement import same_bits
from tests.gpu.runner import Given, each_backend
from tests.gpu.sizes import DECODE, LONG, PACKED, RAGGED
from tests.support.grid import Case, Size, build

pytestmark = [pytest.mark.gpu, *each_backend]

CASES = {
    "causal": Case(LONG, "bfloat16", ("causal",)),
    "wide": Case(Size(2, 2, 1, 577, 641, 128, 128), "bfloat16", ("causal",)),
    "everything": Case(LONG, "bfloat16", ("everything",)),
    "shared bias": Case(LONG, "bfloat16", ("bias one number",)),
    "sink": Case(LONG, "bfloat16", ("sink",)),
    "decode": Case(DECODE, "bfloat16", ("causal",)),
    "packed": Case(PACKED, "bfloat16", ("causal",)),
    "spans": Case(LONG, "bfloat16", ("spans",)),
    "float32": Case(RAGGED, "float32", ("causal",)),
}


@contextmanager
def other_work() -> Iterator[None]:
    """Matrix products and copies on a stream of their own, for longer than any test waits."""
    aside = torch.cuda.Stream()
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        for n in range(500):
            a @ b
            if n % 3 == 0:
                a.clone()
    try:
        yield
    finally:
        aside.synchronize()


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("name", CASES)
def test_twenty_runs(name: str, deterministic: bool) -> None:
    call = build(CASES[name])
    given = Given(replace(call, options=call.options | {"deterministic": deterministic}), "cuda")
    first = [x.clone() for x in given.step()]
    with other_work():
        runs = [given.step() for _ in range(19)]
    for n, found in enumerate(runs):
        assert given.alike(found, first), f"run {n + 2} differs from the first"


@pytest.mark.parametrize("name", ["everything", "causal", "packed"])
def test_torch_may_ask_for_determinism(name: str) -> None:
    """torch.use_deterministic_algorithms also fills new memory with NaN."""
    call = build(CASES[name])
    first = Given(replace(call, options=call.options | {"deterministic": True}), "cuda").step()
    given = Given(call, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        runs = [given.step() for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same_bits(x, y) for again in runs for x, y in zip(first, again, strict=True))


def test_the_numbers_of_one_sequence_do_not_depend_on_its_neighbours() -> None:
    """The same bits at any place of a batch."""
    whole = build(Case(LONG, "bfloat16", ("causal",)))
    together = Given(whole, "cuda").forward()[0]
    reversed_ = Given(replace(whole, q=whole.q[::-1], k=whole.k[::-1], v=whole.v[::-1]), "cuda").forward()[0]
    assert same_bits(together, reversed_.flip(0))
