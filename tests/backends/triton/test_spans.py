"""Spans in the Triton kernels under the interpreter: cuts, walks over the queries that see keys, and whole calls."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.band import Band, Cuts, Kind
from flashtile.numerics.visibility import Visibility
from flashtile.problem import describe
from tests import test_nonfinite as nonfinite
from tests.backends.triton import kernels
from tests.backends.triton.test_nonfinite import INSIDE, RECOMPUTE, check, flags, one_bad_number, processors
from tests.support.grid import Call, Case, Size, build, check_backward, check_forward, truth_of
from tests.support.large_scores import large_scores

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from flashtile.backends.gpu import backward_rows, spans  # noqa: E402
from flashtile.backends.gpu.arguments import Rows, lengths, rule  # noqa: E402
from flashtile.backends.gpu.config import Config  # noqa: E402
from flashtile.backends.gpu.tensors import laid_out  # noqa: E402
from flashtile.backends.triton import tuning  # noqa: E402
from flashtile.backends.triton.backward_kernels import row_cuts_kernel  # noqa: E402
from flashtile.backends.triton.passes import Runner  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(kernels.DEVICE == "cuda", reason="tests/gpu does this on the GPU"),
]
BLOCK = 16
__all__ = ["flags"]  # a fixture


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, a few of which are a chunk of visits already."""
    monkeypatch.setattr(tuning, "choose", lambda *_: Config(BLOCK, BLOCK, 4, 1))
    for module in (spans, backward_rows):
        monkeypatch.setattr(module, "CHUNK", triton.language.constexpr(2))
    monkeypatch.setattr(spans, "WIDE", triton.language.constexpr(4))


def cuts_of(some: ft.Spans, band: Band, n_q: int, n_k: int, br: int, bc: int) -> list[list[tuple[Cuts, ...]]]:
    """What row_cuts_kernel stores for each head and row of tiles."""
    heads, count = some.limits.shape[1], some.limits.shape[3]
    q, k = torch.empty(1, heads, n_q, 1), torch.empty(1, 1, n_k, 1)
    p = describe(q, k, k, spans=ft.Spans.of(torch.from_numpy(some.limits.copy())), band=band)
    tiles = -(-n_q // br)
    found = torch.zeros((heads, 4 * count, tiles), dtype=torch.int32)
    rows = Rows(found, 0, 4 * count * tiles, tiles)
    row_cuts_kernel[(heads * tiles,)](rows, rule(p), lengths(p), tiles, heads, CUT_Q=br, CUT_K=bc)
    return [
        [tuple(Cuts(*cut) for cut in row) for row in head] for head in found.mT.reshape(heads, tiles, count, 4).tolist()
    ]


def check_cuts(limits: Any, band: Band, n_k: int, br: int, bc: int) -> None:
    """Compare with visibility.py, head by head. dkdv_kernel needs no full tile in a last row that is not whole."""
    some = ft.Spans.of(np.asarray(limits, np.int32))
    n_q = some.limits.shape[2]
    for head, found in enumerate(cuts_of(some, band, n_q, n_k, br, bc)):
        wanted = Visibility(band, some.limits[0, head]).rows(n_q, n_k, br, bc)
        if n_q % br:
            wanted[-1] = tuple(Cuts(c.begin, c.full_begin, c.full_begin, c.end) for c in wanted[-1])
        assert found == wanted, (some.limits[0, head].tolist(), n_q, n_k, br, bc)


def test_cuts_of_every_pair_of_rows() -> None:
    """All spans of two queries and four keys."""
    of_row = [(b, e) for b in range(5) for e in range(b + 1, 6)] + [(0, 0)]
    check_cuts([[[[x], [y]] for x, y in itertools.product(of_row, of_row)]], Band(), 4, 2, 2)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("band", [Band(), Band(2, 1, -1), Band(-3, 2)], ids=str)
def test_cuts_is_the_twin_of_visibility_py(band: Band, count: int) -> None:
    rng = np.random.default_rng(count)
    for n_q, n_k, br, bc in ((5, 9, 2, 2), (8, 23, 4, 3), (3, 4, 4, 2)):
        check_cuts(rising(rng, (1, 4), n_q, n_k, count), band, n_k, br, bc)


def rising(rng: np.random.Generator, heads: tuple[int, int], n_q: int, n_k: int, count: int, alike: int = 1) -> Any:
    """Limits of spans, of which `alike` neighbours have the same. A few are empty: others may then lie before them.

    heads: sequences and heads.
    """
    ends = np.sort(rng.integers(0, n_k + 3, (*heads, -(-n_q // alike), 2 * count)), -1)
    begin, end = ends[..., ::2], ends[..., 1::2]
    end = np.where(rng.random(end.shape) < 0.2, begin, end)
    return np.repeat(ft.Spans(begin, end).limits, alike, axis=2)[:, :, :n_q]


def call_with(size: Size, dtype: str, count: int, *options: str, heads: int = 1, seed: int = 0) -> Call:
    """A call with spans that whole tiles have in common, so that some are full."""
    call = build(Case(size, dtype, options))
    rng = np.random.default_rng(seed)
    limits = rising(rng, (size.batch, heads), size.n_q, size.n_k, count, alike=24)
    return replace(call, options=call.options | {"spans": ft.Spans.of(limits)})


LONG = Size(1, 1, 1, 55, 75, 16, 24)  # four rows of tiles, the last one ragged: two chunks of visits
BATCH = Size(2, 2, 1, 21, 37, 16, 8)
PACKED = Size.packed(2, 1, 16, 16, (5, 9), (0, 4), (40, 50), (17, 0))
DECODE = Size(1, 4, 2, 2, 300, 16, 16)
CALLS = {
    "one": call_with(replace(LONG, heads=2), "float32", 1, seed=9),
    "eight and a band": call_with(LONG, "float32", 8, "window", "dropout"),
    "of heads": call_with(BATCH, "float16", 3, "sink", "kv_lengths", heads=2),
    "bias": call_with(BATCH, "float32", 2, "mask of keys", "bias", "alibi", "softcap"),
    "packed": call_with(PACKED, "float32", 3, "causal", "kv_lengths"),
    "packed heads": call_with(PACKED, "float32", 2, heads=2),
}


def run(call: Call) -> None:
    """Compare with the oracle; tests of NaN check recomputed tiles too."""
    exact = truth_of(call)
    out, lse = kernels.forward(call)
    check_forward(call, exact, out, lse)
    check_backward(call, exact, kernels.backward(call, out, lse))


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    run(CALLS[name])


def test_calls_have_full_and_partial_tiles() -> None:
    limits = CALLS["one"].options["spans"].limits
    rows = Visibility(Band(), limits[0, 0]).rows(LONG.n_q, LONG.n_k, BLOCK, BLOCK)
    kinds = [kind for row in rows for _, kind in itertools.chain(*row)]
    assert kinds.count(Kind.FULL) >= 4 and kinds.count(Kind.PARTIAL) >= 4


@pytest.mark.parametrize("heads", [1, 4])
def test_split_decode(heads: int) -> None:
    """Each share is of the tiles that are visited, with gaps. Heads that share rows may have spans of their own."""
    begin = np.array([[0, 90, 230]]) + 17 * np.arange(heads)[:, None]
    spans = ft.Spans(begin[None, :, None], begin[None, :, None] + np.array([30, 20, 90]))
    call = build(Case(DECODE, "float32", ("sink",)))
    call = replace(call, options=call.options | {"spans": spans})
    with processors(INSIDE):
        prepared = Runner(laid_out(kernels.problem_of(call))).forward
        assert prepared._splits > 1 and prepared._kernel.constants["PACKED_HEADS"] == 2
        check_forward(call, truth_of(call), *kernels.forward(call))


DOCUMENTS = (2 * BLOCK, BLOCK, BLOCK)


def test_tiles_in_no_span_are_not_computed(flags: list[Any]) -> None:
    """A NaN in a document flags tiles of that document alone, although a masked one would spoil any tile."""
    n = sum(DOCUMENTS)
    call = build(Case(Size(1, 1, 1, n, n, 8, 8), "float32"))
    call = replace(call, options={"spans": ft.masks.documents(lengths=DOCUMENTS)})
    clean = kernels.forward(call)
    with processors(RECOMPUTE):
        for name in "kv":
            kernels.forward(nonfinite.changed(call, name, (0, 0, slice(32, 48)), np.nan))
        for name in ("q", "v"):
            kernels.backward(nonfinite.changed(call, name, (0, 0, slice(32, 48)), np.nan), *clean)
    assert [x.flatten().tolist() for x in flags[:2]] == [[0, 0, 1, 0]] * 2
    assert [x.flatten().tolist() for x in flags[3::2]] == [[0, 0, 1, 0] * 2] * 2  # next to the table of cuts


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (("spans of rows",), "float32"),
        pytest.param(("spans", "dropout", "causal"), "float16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nan(options: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the rows that see it. Tiles are two careful ones in float32."""
    monkeypatch.setattr(tuning, "choose", lambda *_: Config(32, 32, 4, 1))
    check(*one_bad_number(Size(4, 1, 1, 37, 48, 8, 8), options, dtype, np.nan))


def test_gradients_of_large_scores() -> None:
    call = large_scores(2.0**33, ("spans of rows", "causal"), "float32", Size(1, 2, 1, 34, 40, 8, 8))
    run(call)
