"""The Hopper kernels on the emulator: their results, against the oracle, for any order of their roles."""

from __future__ import annotations

import zlib
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

import torch

from flashtile.backends import gluon
from flashtile.backends.gluon import backward, forward
from flashtile.backends.gluon.work_counters import MAX_FLAGS, WorkCounters
from flashtile.cost import traffic
from flashtile.numerics.dtypes import narrow, widen
from tests.backends.gluon.emulated import Emulated, emulated, marks
from tests.backends.gluon.emulator.processor import Descriptor
from tests.backends.triton import kernels
from tests.gpu.order_of_sums import order_sensitive
from tests.gpu.runner import check
from tests.gpu.test_hopper import BANDS, DIMS, KINDS, each_dim, jump, stairs
from tests.gpu.test_random import Kind, problem
from tests.support.grid import OPTIONS, Call, Case, Size, build, check_backward, truth, truth_of
from tests.support.large_scores import large_scores
from tests.support.runners import Runner

pytestmark = marks
SIZES = {
    64: Size(1, 4, 2, 200, 300, 64, 64),
    128: Size(2, 2, 1, 130, 300, 128, 96),
    256: Size(1, 2, 2, 100, 150, 256, 192),
}
PACKED = ((64, 64), (0, 7), (5, 0), (77, 200), (0, 0), (130, 129))
TAKEN = [
    name
    for name in OPTIONS
    if not {"spans", "mask", "bias", "dropout", "scale negative", "scale zero", "everything"} & {name, name.split()[0]}
]
CASES = [
    *(Case(SIZES[dim], "bfloat16", (name,)) for name in TAKEN for dim in DIMS),
    *(
        Case(SIZES[dim], "float16", names)
        for names in (("causal",), ("window", "softcap", "sink", "alibi"))
        for dim in DIMS
    ),
    *(
        Case(Size.packed(4, 2, dim, dim, *PACKED), "bfloat16", names)
        for names in (("plain",), ("causal",), ("window", "sink"), ("kv_lengths", "alibi of batch", "softcap"))
        for dim in DIMS
    ),
    *(
        Case(Size(2, heads, 2, n, 301, 64, 64), "bfloat16", ("causal",))
        for heads, n in ((2, 1), (8, 5), (16, 33), (32, 3))
    ),
    *(Case(SIZES[dim], "bfloat16", ("causal",), wide_out=True) for dim in DIMS),
    *(Case(SIZES[dim], "bfloat16", ("causal",), "rows first") for dim in DIMS),
]


def agree(case: Case) -> None:
    check(build(case), truth(case), emulated(seed=zlib.crc32(str(case).encode())))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agreement(case: Case) -> None:
    assert emulated().refusal(build(case)) is None
    agree(case)


@each_dim
@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129, 191, 193, 257])
def test_lengths_about_a_tile(n: int, dim: int) -> None:
    for option in ("plain", "causal"):
        agree(Case(Size(1, 1, 1, n, n, dim, dim), "bfloat16", (option,)))


@each_dim
@pytest.mark.parametrize("lengths", [(1, 129), (63, 385), (193, 128), (64, 1), (385, 63)], ids=str)
def test_more_keys_than_queries_and_more_queries_than_keys(lengths: tuple[int, int], dim: int) -> None:
    agree(Case(Size(1, 2, 1, *lengths, dim, dim), "bfloat16", ("causal",)))


@each_dim
@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str, dim: int) -> None:
    call = replace(build(Case(Size(1, 2, 1, 260, 330, dim, dim), "bfloat16")), options={"band": BANDS[name]})
    check(call, truth_of(call), emulated(seed=dim))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_problems_at_random(kind: Kind) -> None:
    some_problems(kind, 0, 1, recomputes=(False, False))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_thousand_problems(kind: Kind) -> None:
    """With alibi a row may be far from all keys that it sees, and near some that are not in use:

    their weights overflow in the backward pass.
    """
    some_problems(kind, 1, 50, recomputes=(False, None if "alibi" in kind.options else False))


def some_problems(kind: Kind, first_seed: int, count: int, recomputes: tuple[bool | None, bool | None]) -> None:
    for seed in range(first_seed, first_seed + count):
        call = problem(kind, np.random.default_rng([zlib.crc32(str(kind).encode()), seed]), (1, 400))
        check(call, truth_of(call), emulated(seed, 1 + seed % 4, recomputes))


# ---- schedules ----


def bits(*results: Any) -> list[bytes]:
    return [np.ascontiguousarray(x).tobytes() for x in results]


@each_dim
@pytest.mark.parametrize("options", [("causal",), ("window", "kv_lengths")], ids="+".join)
def test_any_order_gives_the_same_bits(options: tuple[str, ...], dim: int) -> None:
    """For any schedule of roles and programs, except that dQ is a sum in no fixed order."""
    case = Case(Size(1, 2, 1, 200, 330, dim, dim), "bfloat16", options)
    call, against, first = build(case), truth(case), None
    for seed in range(9):
        runner = emulated(seed, processors=1 + seed % 4)
        out, lse = runner.forward(call)
        grads = runner.backward(call, out, lse)
        check_backward(call, against, grads)
        first = first or bits(out, lse, grads.dk, grads.dv)
        assert bits(out, lse, grads.dk, grads.dv) == first, seed


def sums_of(call: Call, seeds: int, **options: Any) -> set[bytes]:
    """dQ of numbers that reveal the order of their sum, for each seed."""
    found = set()
    for seed in range(seeds):
        runner, one = emulated(seed, processors=(2, 3, 5)[seed % 3]), replace(call, options=options)
        found.add(*bits(runner.backward(one, *runner.forward(one)).dq))
    return found


each_tile = pytest.mark.parametrize(("dim", "tile"), [(64, 128), (128, 128), (256, 64)])
full_or_causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@each_tile
@full_or_causal
def test_sums_in_a_fixed_order(causal: bool, dim: int, tile: int) -> None:
    """With any number of processors."""
    assert len(sums_of(order_sensitive(1, 3, 4 * tile, dim, tile), 4, causal=causal, deterministic=True)) == 1


@each_tile
@full_or_causal
def test_sums_in_no_fixed_order_differ(causal: bool, dim: int, tile: int) -> None:
    """Otherwise the test above could not fail."""
    assert len(sums_of(order_sensitive(1, 3, 4 * tile, dim, tile), 4, causal=causal)) > 1


# ---- copies ----


@each_dim
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}], ids=["full", "causal", "window"])
def test_copies_are_those_of_the_traffic_model(options: dict[str, Any], dim: int) -> None:
    """Queries and output once, keys and values as often as traffic.py predicts for such tiles, to the element."""
    call = replace(build(Case(Size(2, 4, 2, 768, 768, dim, dim), "bfloat16")), options=options)
    p = kernels.problem_of(call)
    tile, band = gluon.tile(p), p.band_for(p.n_q, p.n_k)
    copied = Counter[str]()

    def counted(of: Any, name: str) -> Any:
        def copy(desc: Descriptor, at: list[int], *rest: Any) -> None:
            copied[name] += desc.inside(at)[0].numel()
            of(desc, at, *rest)

        return mock.patch.object(Descriptor, name, copy)

    with counted(Descriptor.fetch, "fetch"), counted(Descriptor.put, "put"):
        emulated().forward(call)
    grids = p.sequences * p.heads // tile.heads
    visited = grids * traffic.keys_visited(band, p.n_q, p.n_k, tile.rows, tile.keys)
    rows = p.sequences * p.heads * p.n_q
    assert copied == {"fetch": (rows + 2 * visited) * dim, "put": rows * dim}


# ---- numbers ----


@each_dim
def test_integers_are_exact(dim: int) -> None:
    """Two keys outweigh all others; their values are averaged."""
    rng = np.random.default_rng(dim)
    q, k = np.zeros((1, 2, 130, dim)), np.zeros((1, 2, 300, dim))
    q[..., 0], k[:, :, [7, 211], 0] = 8.0, 8.0
    v = rng.integers(-8, 9, (1, 2, 300, dim)) * 2.0
    call = Call(*(narrow(x, "bfloat16") for x in (q, k, v)), {"scale": 1.0}, None, None)
    out, lse = emulated(dim).forward(call)
    mean = v[:, :, [7, 211]].mean(2, keepdims=True)
    np.testing.assert_allclose(widen(out, np.float64), np.broadcast_to(mean, out.shape), rtol=0, atol=2.0**-80)
    np.testing.assert_allclose(lse, 8 * 8 + np.log(2), rtol=2e-7)


@each_dim
def test_hidden_numbers_have_no_effect(dim: int) -> None:
    hide_nan(dim, seed=dim)


def hide_nan(dim: int, seed: int) -> None:
    """NaN beyond the keys in use, next to which the next head begins."""
    call = build(Case(Size(2, 2, 2, 200, 200, dim, dim), "bfloat16"))
    call = replace(call, options={"causal": True, "kv_lengths": np.array([150, 70], np.int32)})
    hidden = {name: widen(getattr(call, name), np.float64) for name in "kv"}
    for x in hidden.values():
        x[0, :, 150:], x[1, :, 70:] = np.nan, np.nan
    runner = emulated(seed, recomputes=(True, False))
    beside = Runner("beside NaN", *(partial(_of_others, run, hidden) for run in (runner.forward, runner.backward)))
    check(call, truth_of(call), beside)


def _of_others(run: Any, others: dict[str, Any], call: Call, *results: Any) -> Any:
    """Run the call with these numbers instead of its own."""
    return run(replace(call, **{name: narrow(x, "bfloat16") for name, x in others.items()}), *results)


@each_dim
@pytest.mark.parametrize("options", [(), ("causal", "sink"), ("window", "kv_lengths")], ids="+".join)
def test_gradients_of_large_scores(options: tuple[str, ...], dim: int) -> None:
    """Their lse has lost the logarithm of the sum: such rows are recomputed from maximum and sum."""
    call = large_scores(2.0**33, options, "bfloat16", Size(1, 2, 1, 100, 150, dim, dim))
    check(call, truth_of(call), emulated(dim, recomputes=(None, True)))


def test_gradients_of_large_scores_in_packed_sequences() -> None:
    call = large_scores(2.0**33, ("causal",), "bfloat16", Size.packed(4, 2, 64, 64, *PACKED))
    check(call, truth_of(call), emulated(recomputes=(None, True)))


def test_counters_are_reset() -> None:
    check_counters()


def check_counters() -> None:
    """The next launch on a stream uses the same ones."""
    counters, flags = torch.zeros(2, dtype=torch.int32), torch.full((MAX_FLAGS,), 7, dtype=torch.int32)
    pool: list[WorkCounters] = []
    with ExitStack() as stack:
        for module in (forward, backward):
            stack.enter_context(
                mock.patch.object(module, "acquire_counters", lambda _device: WorkCounters(counters, flags, pool))
            )
        for dim in DIMS:
            agree(Case(SIZES[dim], "bfloat16", ("causal",)))
            assert not counters.any() and pool.pop().counters is pool.pop().counters is counters


@pytest.mark.parametrize("levels", [[0, 100, 0], [0, 30, 60, 150], [0, 0, 300, 0], [0, 2000]], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_jumps(levels: list[int], dtype: str) -> None:
    """Even past the largest weight; such rows are recomputed."""
    jump(
        stairs(levels, 64, dtype), emulated(len(levels), recomputes=(dtype == "bfloat16" and max(levels) > 200, False))
    )


EACH = torch.tensor([[0.5, 2.0], [1.25, 0.0625]])


@each_dim
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "descale": (EACH, 2 * EACH, 3 * EACH)},
        {"window": (100, 30), "out_dtype": torch.float32, "descale": (torch.tensor(0.75), EACH, 1.0)},
        {"softcap": 5.0, "sink": torch.arange(8.0), "alibi": torch.rand(8), "descale": (EACH, 1.0, 1.0)},
        {"kv_lengths": torch.tensor([300, 7], dtype=torch.int32), "out_dtype": torch.bfloat16},
    ],
    ids="+".join,
)
def test_eight_bits(options: dict[str, Any], dim: int) -> None:
    """Four query heads share a key head; with few queries they share rows too."""
    for n, n_q in enumerate((257, 5)):
        replace(Emulated.draw((2, 8, n_q, dim), (2, 2, 300, dim), **options), seed=n).check()
