"""One grid of backends, options, dtypes and ragged sizes, forward and backward, against the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from tests.support.grid import COMBINATIONS, LAYOUTS, OPTIONS, Case, Size, build, check_backward, check_forward, truth
from tests.support.runners import RUNNERS, Runner, every_runner

DTYPES = ("float16", "bfloat16", "float32", "float64")
RAGGED = Size(2, 4, 2, 65, 63, 33, 17)
LONG_KEYS = Size(3, 2, 1, 17, 129, 64, 64)

# Each length and width at the edges of tiles and vectors, at least once for queries and once for keys.
SIZES = (
    Size(8, 4, 4, 1, 1, 1, 1),
    Size(8, 2, 1, 1, 2, 8, 3),
    Size(8, 2, 2, 2, 1, 3, 8),
    Size(4, 2, 1, 2, 17, 33, 33),
    Size(2, 2, 2, 17, 2, 64, 1),
    Size(2, 2, 1, 63, 64, 80, 64),
    Size(1, 4, 4, 64, 65, 128, 128),
    Size(1, 4, 2, 65, 127, 16, 48),
    Size(1, 2, 1, 127, 128, 256, 80),
    Size(1, 2, 2, 128, 129, 1, 128),
    Size(1, 8, 1, 129, 63, 72, 72),
    Size(1, 2, 1, 300, 17, 64, 64),
    Size(1, 2, 2, 129, 300, 64, 64),
    Size(1, 2, 1, 300, 300, 40, 40),
    Size(1, 2, 1, 33, 65, 512, 512),
    Size(1, 1, 1, 64, 31, 511, 2),
)
DECODE = (
    Size(2, 8, 8, 1, 300, 64, 64),
    Size(1, 8, 4, 1, 1025, 128, 128),
    Size(1, 8, 2, 2, 700, 80, 33),
    Size(2, 8, 1, 1, 2049, 64, 64),
    Size(1, 4, 1, 3, 513, 128, 64),
    Size(1, 8, 1, 4, 4097, 33, 33),
    Size(1, 2, 1, 1, 5000, 256, 256),
    Size(1, 8, 2, 1, 600, 512, 512),
)
PACKED = (
    Size.packed(4, 2, 33, 17, (17, 30), (0, 5), (65, 63), (4, 0), (1, 129)),
    Size.packed(2, 2, 64, 64, (128, 128), (1, 1), (0, 0), (33, 40)),
    Size.packed(8, 1, 80, 80, (1, 300), (1, 17), (2, 64), (1, 0)),
)
IN_DECODE = ("plain", "causal", "window left", "spans", "spans of heads", "everything")
IN_PACKED = (
    *("plain", "causal", "window", "band", "spans", "spans of rows", "spans of heads"),
    *("mask", "bias", "bias of rows", "alibi of batch", "sink", "dropout"),
)


def grid() -> list[Case]:
    every = [
        Case(size, dtype, (option,))
        for option, dtype, size in itertools.product(OPTIONS, DTYPES, (RAGGED, LONG_KEYS))
        if dtype != "float16" or size is RAGGED or option == "everything"
    ]
    every += [Case(RAGGED, dtype, names) for names in COMBINATIONS for dtype in DTYPES]
    # The sizes cycle through the dtypes, so that each dtype meets each of these options.
    for n, size in enumerate(SIZES):
        every += [Case(size, DTYPES[(n + m) % 4], (o,)) for m, o in enumerate(("plain", "causal", "everything"))]
        every += [Case(size, "float32", ("plain",)), Case(size, "float64", ("everything",))]
    for n, size in enumerate(DECODE):
        every += [Case(size, DTYPES[(n + m) % 4], (o,)) for m, o in enumerate(IN_DECODE)]
        every += [Case(size, "float32", (o,)) for o in IN_DECODE]
    for n, size in enumerate(PACKED):
        every += [Case(size, DTYPES[(n + m) % 4], (o,)) for m, o in enumerate(IN_PACKED)]
        every += [Case(size, d, (o,)) for o in ("kv_lengths", "everything") for d in DTYPES]
    for layout in LAYOUTS[1:]:
        every += [Case(RAGGED, d, (o,), layout) for o in ("causal", "everything") for d in DTYPES]
        every += [Case(DECODE[0], "float32", ("causal",), layout), Case(PACKED[0], "bfloat16", ("causal",), layout)]
    every += [Case(RAGGED, d, (o,), wide_out=True) for o in ("causal", "everything") for d in DTYPES]
    every += [Case(DECODE[2], "bfloat16", ("causal",), wide_out=True), Case(PACKED[0], "float16", wide_out=True)]
    return list(dict.fromkeys(every))


CASES = grid()


def agree(case: Case, runner: Runner) -> None:
    call, exact = build(case), truth(case)
    before = {name: x.copy() for name, x in call.inputs().items()}
    out, lse = runner.forward(call)
    check_forward(call, exact, out, lse)
    check_backward(call, exact, runner.backward(call, out, lse))
    for name, x in call.inputs().items():
        np.testing.assert_array_equal(x, before[name], f"{name} was written to")


@every_runner
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agreement(case: Case, runner: Runner) -> None:
    agree(case, runner)


@pytest.mark.slow
@every_runner
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", (*SIZES, *DECODE, *PACKED), ids=str)
def test_full_product(size: Size, option: str, runner: Runner) -> None:
    for dtype in DTYPES:
        agree(Case(size, dtype, (option,)), runner)


@every_runner
def test_gradients_without_dlse(runner: Runner) -> None:
    """dlse=None is dlse=0."""
    from dataclasses import replace

    call = build(Case(RAGGED, "float64", ("everything",)))
    out, lse = runner.forward(call)
    none = runner.backward(replace(call, dlse=None), out, lse)
    zero = runner.backward(replace(call, dlse=np.zeros_like(call.dlse)), out, lse)
    for name, x in none._asdict().items():
        np.testing.assert_array_equal(x, getattr(zero, name), name)


@every_runner
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, 2, 5, 4), (0, 2, 7, 4)),
        ((2, 2, 0, 4), (2, 2, 7, 4)),
        ((2, 2, 5, 4), (2, 2, 0, 4)),
        ((2, 2, 0, 4), (2, 1, 0, 4)),
    ],
    ids=["no batch", "no queries", "no keys", "neither"],
)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_sizes_of_zero(q_shape: Any, k_shape: Any, sink: bool, runner: Runner) -> None:
    """Results have the right shape; rows without a key have output 0, lse -inf (or the sink) and gradients 0."""
    from tests.support.grid import Call

    q, k, v = np.ones(q_shape, np.float32), np.ones(k_shape, np.float32), np.ones((*k_shape[:3], 3), np.float32)
    options = {"sink": np.array([0.5, -2], np.float32)} if sink else {}
    call = Call(q, k, v, options, np.ones((*q_shape[:3], 3), np.float32), np.ones(q_shape[:3], np.float32))
    out, lse = runner.forward(call)
    assert out.shape == (*q_shape[:3], 3) and not out.any()
    expected = np.broadcast_to(np.array([0.5, -2])[:, None] if sink else -np.inf, q_shape[:3])
    np.testing.assert_array_equal(lse, expected)
    grads = runner.backward(call, out, lse)
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        assert getattr(grads, name).shape == like.shape and not getattr(grads, name).any(), name
    if sink:  # lse is the sink itself here, so its gradient is that of the lse
        np.testing.assert_allclose(grads.dsink, np.full(2, q_shape[0] * q_shape[2]), rtol=1e-6)


@every_runner
def test_rows_that_see_no_key(runner: Runner) -> None:
    """They are exactly 0 and -inf, not only close to it."""
    call = build(Case(RAGGED, "float32", ("mask with empty rows",)))
    out, lse = runner.forward(call)
    grads = runner.backward(call, out, lse)
    assert not out[:, :, ::3].any() and np.isneginf(lse[:, :, ::3]).all() and not grads.dq[:, :, ::3].any()
    assert np.isfinite(np.delete(lse, np.s_[::3], axis=2)).all()


def test_auto_is_the_first_backend_of_the_table() -> None:
    call = build(Case(RAGGED, "float32", ("everything",)))
    first = next(r for r in RUNNERS if not _missing(r))
    auto = ft.attention(call.q, call.k, call.v, **call.options)
    np.testing.assert_array_equal(auto, first.forward(call)[0])


def _missing(runner: Runner) -> str | None:
    from tests.support.runners import why_missing

    return why_missing(runner.name)
