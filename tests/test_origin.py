"""Origin: a part of a call drops what the whole drops, so that parts add up to the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import flashtile as ft
from tests.support.grid import Call, Case, Size, build, standard_attention
from tests.support.parts import Part, divided, kept, merged, showing_bits, summed
from tests.support.runners import Runner, every_runner

FEW = settings(max_examples=8)
SMALL = Size(2, 4, 2, 5, 22, 8, 6)


def needs_dropout(runner: Runner, call: Call) -> None:
    if reason := runner.refusal(call):
        pytest.skip(reason)


@every_runner
@FEW
@given(whole=divided())
def test_parts_add_up_to_the_whole(runner: Runner, whole: tuple[Call, list[Part]]) -> None:
    call, parts = whole
    needs_dropout(runner, call)
    exact = standard_attention(call, "float64")
    out, lse = merged(call, parts, runner.forward)
    np.testing.assert_allclose(out, exact["out"], atol=1e-12)
    np.testing.assert_allclose(lse, exact["lse"], atol=1e-12)
    if runner.name == "reference":  # it recomputes lse, which a part of the keys does not determine
        parts = [p for p in parts if p.keys == parts[0].keys]
        parts = list({(p.sequences.start, p.heads.start, p.queries.start): p for p in parts}.values())
        parts = [Part(p.sequences, p.heads, p.queries, slice(0, call.k.shape[2])) for p in parts]
    for name, found in summed(call, parts, exact["out"], exact["lse"], runner.backward):
        np.testing.assert_allclose(found, exact[name], atol=1e-12, err_msg=name)


ORIGINS = (
    ft.Origin(),
    ft.Origin(key=64, query=3),
    ft.Origin(key=2),
    ft.Origin(key=7, key_step=2, query_step=3),
    ft.Origin(key=1, key_step=5, head=3, sequence=2, heads=9),
    ft.Origin(query=2**31 - 80, key=2**31 - 23, sequence=2**28, heads=4),
    ft.Origin(key_step=10**7, query_step=10**7),
)


@every_runner
@pytest.mark.parametrize("n_q", [1, 5, 70])
@pytest.mark.parametrize("origin", ORIGINS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_bits(runner: Runner, origin: ft.Origin, n_q: int, dtype: str) -> None:
    check_bits(runner, origin, Size(2, 4, 2, n_q, 22, 8, 6), dtype)


@every_runner
@pytest.mark.parametrize("n_q", [1, 70])
@pytest.mark.parametrize("origin", [ft.Origin(key=8), ft.Origin(key=7), ft.Origin(9, 1, key_step=3)], ids=str)
def test_the_same_bits_of_many_tiles(runner: Runner, origin: ft.Origin, n_q: int) -> None:
    check_bits(runner, origin, Size(1, 2, 1, n_q, 500, 8, 6), "float32")


def check_bits(runner: Runner, origin: ft.Origin, size: Size, dtype: str) -> None:
    call = build(Case(size, dtype, ("dropout",)))
    call = replace(call, options=call.options | {"origin": origin})
    needs_dropout(runner, call)
    out, _ = runner.forward(showing_bits(call))
    np.testing.assert_array_equal(out != 0, kept(call))


@every_runner
def test_packed_sequences_count_from_the_same_places(runner: Runner) -> None:
    """Each sequence is as one of a batch; in a part they are those from `sequence` on."""
    size = Size.packed(2, 1, 8, 6, (5, 9), (0, 3), (7, 7), (3, 20))
    whole = build(Case(size, "float64", ("dropout",)))
    needs_dropout(runner, whole)
    origin = {"query": 6, "key": 3, "heads": 3, "head": 1, "query_step": 2, "key_step": 3}
    whole = replace(whole, options=whole.options | {"origin": ft.Origin(**origin)})
    out, lse = runner.forward(whole)
    (q_start, q_end), (k_start, k_end) = (whole.packed[name][[2, 4]] for name in ("cu_q", "cu_k"))
    later = Call(
        whole.q[q_start:q_end],
        whole.k[k_start:k_end],
        whole.v[k_start:k_end],
        whole.options | {"origin": ft.Origin(sequence=2, **origin)},
        whole.dout[q_start:q_end],
        whole.dlse[q_start:q_end],
        {name: x[2:] - x[2] for name, x in whole.packed.items()},
    )
    found, found_lse = runner.forward(later)
    np.testing.assert_allclose(found, out[q_start:q_end], atol=1e-14)
    np.testing.assert_allclose(found_lse, lse[q_start:q_end], atol=1e-14)
    grads = runner.backward(whole, out, lse)
    np.testing.assert_allclose(runner.backward(later, found, found_lse).dv, grads.dv[k_start:k_end], atol=1e-14)


@every_runner
def test_without_dropout_it_changes_nothing(runner: Runner) -> None:
    call = build(Case(SMALL, "float32", ("causal",)))
    placed = replace(call, options=call.options | {"origin": ft.Origin(9, 3, key_step=2)})
    for x, y in zip(runner.forward(call), runner.forward(placed), strict=True):
        np.testing.assert_array_equal(x, y)


def test_bnhd_and_calls_in_turns() -> None:
    """The origin is part of what a cached call is known by."""
    call = build(Case(SMALL, "float64", ("dropout",)))
    options = call.options
    for _ in range(2):
        for n in (0, 3, 5):
            origin = ft.Origin(query=n, key=np.int64(n))  # type: ignore[arg-type]
            wanted = ft.standard_attention(call.q, call.k, call.v, origin=origin, **options)
            found = ft.attention(call.q, call.k, call.v, origin=origin, **options)
            np.testing.assert_allclose(found, wanted, atol=1e-14)
            q, k, v = (x.swapaxes(1, 2) for x in (call.q, call.k, call.v))
            found = ft.attention(q, k, v, layout="bnhd", origin=origin, **options)
            np.testing.assert_allclose(found.swapaxes(1, 2), wanted, atol=1e-14)


@pytest.mark.parametrize(
    ("origin", "error", "words"),
    [
        ((0, 0), ft.DTypeError, "origin: expected a flashtile.Origin, got tuple"),
        (ft.Origin(query=-1), ft.ShapeError, r"origin.query: expected an integer from 0 to 2147483647, got -1"),
        (ft.Origin(key=0.5), ft.DTypeError, "origin.key: expected an integer, got float"),  # type: ignore[arg-type]
        (ft.Origin(key_step=0), ft.ShapeError, "origin.key_step: expected an integer from 1 to"),
        (ft.Origin(query_step=True), ft.DTypeError, "origin.query_step: expected an integer, got bool"),
        (ft.Origin(head=1), ft.ShapeError, "origin.heads: expected at least 5, because heads begin at 1, got 4"),
        (ft.Origin(heads=3), ft.ShapeError, "origin.heads: expected at least 4, because heads begin at 0, got 3"),
        (ft.Origin(query=2**31 - 2), ft.ShapeError, "origin.query: expected positions up to 2147483647, got 21474836"),
        (ft.Origin(key_step=2**30), ft.ShapeError, "origin.key: expected positions up to 2147483647, got 22548"),
        (ft.Origin(sequence=2**30), ft.ShapeError, "origin.sequence: expected heads of all sequences up to"),
    ],
    ids=str,
)
def test_errors(origin: Any, error: type[Exception], words: str) -> None:
    call = build(Case(SMALL, "float32", ("plain",)))
    for function in (ft.attention, ft.standard_attention):
        with pytest.raises(error, match=f"^{words}"):
            function(call.q, call.k, call.v, origin=origin)


def test_plan() -> None:
    plan = ft.plan((2, 4, 5, 8), (2, 2, 22, 8), dropout=0.5, origin=ft.Origin(key=3))
    assert plan == ft.plan((2, 4, 5, 8), (2, 2, 22, 8), dropout=0.5)
