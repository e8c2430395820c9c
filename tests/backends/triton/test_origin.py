"""Dropout of a part by the Triton kernels: the bits of the whole, forward, backward and in decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.backends.triton import tuning
from tests.backends.triton import kernels
from tests.support.grid import Call, Case, Size, build, standard_attention
from tests.support.parts import OPTIONS, WHOLE, Part, kept, showing_bits
from tests.test_origin import ORIGINS

pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends.gpu.arguments import rule

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.DEVICE == "cpu":
        monkeypatch.setattr(tuning, "choose", lambda *_: tuning.Config(16, 16, 4, 1))


def check_bits(origin: ft.Origin, *size: int) -> None:
    call = build(Case(Size(*size, 8, 6), "float32", ("dropout",)))
    call = replace(call, options=call.options | {"origin": origin})
    out, _ = kernels.forward(showing_bits(call))
    np.testing.assert_array_equal(out != 0, kept(call))


@pytest.mark.parametrize("n_q", [1, 19])
@pytest.mark.parametrize("origin", ORIGINS, ids=str)
def test_the_same_bits(origin: ft.Origin, n_q: int) -> None:
    check_bits(origin, 2, 4, 2, n_q, 22)


def test_the_same_bits_of_split_keys() -> None:
    check_bits(ft.Origin(query=5, key=6, key_step=3), 1, 2, 1, 1, 130)


PARTS = (
    Part(slice(0, 2), slice(0, 2), slice(1, 5, 2), slice(3, 22, 4)),
    Part(slice(1, 2), slice(1, 2), slice(0, 5, 1), slice(8, 22, 1)),
    Part(slice(1, 2), slice(0, 1), slice(4, 5, 1), slice(5, 22, 1)),
)


@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
def test_a_part_of_the_whole(part: Part) -> None:
    """Forward as by the oracle, backward with out and lse of the whole."""
    call = build(Case(replace(WHOLE, n_q=5), "float64", OPTIONS))
    exact, of, rows = standard_attention(call, "float64"), part.of(call), part.rows(2)
    wanted = standard_attention(of, "float64")
    for x, name in zip(kernels.forward(of), ("out", "lse"), strict=True):
        np.testing.assert_allclose(x, wanted[name], atol=1e-12)
    found, right = (run(of, exact["out"][rows], exact["lse"][rows]) for run in (kernels.backward, by_definition))
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(found, name), getattr(right, name), atol=1e-12, err_msg=name)


def by_definition(part: Call, out: Any, lse: Any) -> ft.Grads:
    """Gradients of a part from out and lse of the whole, pair by pair (eq. 9 to 14)."""
    group = part.q.shape[1] // part.k.shape[1]
    k, v = (x.repeat(group, 1) for x in (part.k, part.v))
    scale = part.q.shape[-1] ** -0.5
    S = np.where(part.options["mask"], scale * part.q @ k.swapaxes(-1, -2), -np.inf)
    P = np.exp(S - np.where(np.isneginf(lse), 0, lse)[..., None])
    Z = kept(part) / (1 - part.options["dropout"])
    D = (part.dout * out).sum(-1) - part.dlse
    dS = P * (Z * (part.dout @ v.swapaxes(-1, -2)) - D[..., None])

    def of_groups(x: Any) -> Any:
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    dk, dv = of_groups(scale * dS.swapaxes(-1, -2) @ part.q), of_groups((P * Z).swapaxes(-1, -2) @ part.dout)
    return ft.Grads(scale * dS @ k, dk, dv, None, None)


def test_an_unused_origin_is_compiled_out() -> None:
    """Its fields are None, so that kernels lack their parameters; keys in fours need no arithmetic for each pair."""
    call = build(Case(Size(1, 2, 2, 4, 4, 8, 8), "float32", ("dropout",)))

    def fields(**options: Any) -> list[Any]:
        found = rule(kernels.problem_of(replace(call, options=options)))
        return [found.origin_head, found.origin_query, found.query_step, found.origin_key, found.key_step]

    some = ft.Origin(key=3)
    assert fields(dropout=0.5, seed=1) == fields(dropout=0.5, seed=1, origin=ft.Origin(heads=9)) == [None] * 5
    assert fields(origin=some) == [None] * 5
    assert None not in fields(dropout=0.5, origin=some)
    *others, step = fields(dropout=0.5, origin=ft.Origin(key=8))
    assert None not in others and step is None
