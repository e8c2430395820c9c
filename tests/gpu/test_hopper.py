"""Risks of the Hopper kernels in particular: edges of tiles, jumps of scores, counters, deadlocks.

Tests for every backend run with this backend too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

import flashtile as ft
from flashtile import dispatch
from flashtile.backends.gluon import forward, work_counters
from flashtile.backends.gpu import device as gpu
from flashtile.band import FAR
from flashtile.numerics.dtypes import narrow
from flashtile.problem import describe
from tests.gpu.child import python
from tests.gpu.order_of_sums import order_sensitive
from tests.gpu.placement import same_bits, unprepared
from tests.gpu.runner import CUDA, Given, agree, by_each, check, refusal
from tests.gpu.test_determinism import other_work
from tests.gpu.test_graphs import replay_beside
from tests.gpu.test_random import Kind, try_some
from tests.support.grid import Call, Case, Size, build, truth_of
from tests.support.runners import Runner

pytestmark = [pytest.mark.gpu, *by_each("gluon")]

DIMS = (64, 128, 256)  # each has tiles of its own
each_dim = pytest.mark.parametrize("dim", DIMS)
halves = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def all_agree(*cases: Case) -> None:
    """Outputs and lse agree, and no call is left to another backend."""
    for case in cases:
        assert refusal(build(case)) is None, str(case)
    agree(*cases, backward=False)


# ---- sizes ----

# One more and one less than a warpgroup's rows, a tile of keys, and the rows of two and of three warpgroups.
NEAR = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385)
UNLIKE = ((1, 64), (1, 129), (1, 4097), (63, 385), (129, 700), (193, 128), (64, 1), (129, 1), (385, 63), (700, 129))


@each_dim
@pytest.mark.parametrize("option", ["plain", "causal"])
def test_lengths_about_a_tile(option: str, dim: int) -> None:
    all_agree(*(Case(Size(1, 2, 2, n, n, dim, dim), "bfloat16", (option,)) for n in NEAR))


@each_dim
@pytest.mark.parametrize("option", ["causal", "window"])
def test_more_keys_than_queries_and_more_queries_than_keys(option: str, dim: int) -> None:
    """With fewer keys, the first rows see none."""
    all_agree(*(Case(Size(2, 2, 1, *lengths, dim, dim), "bfloat16", (option,)) for lengths in UNLIKE))


@each_dim
def test_4097(dim: int) -> None:
    all_agree(*(Case(Size(1, 1, 1, 4097, 4097, dim, dim), "bfloat16", (option,)) for option in ("plain", "causal")))


BANDS = {
    "wide": ft.Band(200, 100, 17),
    "narrow": ft.Band(3, 2, -40),
    "only behind": ft.Band(150, -65, 0),
    "only ahead": ft.Band(-65, 150, 0),
    "to the end": ft.Band(1 << 40, 64, 0),
    "from the start": ft.Band(64, 1 << 40, 0),
    "of no width": ft.Band(-5, 3, 0),
    "past the end": ft.Band(10, 10, 5000),
    "before the start": ft.Band(10, 10, -5000),
}


@each_dim
@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str, dim: int) -> None:
    """Tiles that only one warpgroup of a program sees; rows that see nothing get exactly 0."""
    call = build(Case(Size(1, 2, 1, 450, 500, dim, dim), "bfloat16"))
    call = replace(call, options={"band": BANDS[name]})
    exact = truth_of(call)
    check(call, exact, backward=False)
    out, lse = CUDA.forward(call)
    assert not out[np.isneginf(lse)].any()
    assert np.isneginf(lse).any() == (name not in ("wide", "to the end", "from the start"))


@pytest.mark.parametrize("group", range(1, 17))
def test_groups(group: int) -> None:
    """Groups of 2, 4, 8 and 16 heads share the rows of a tile if there are few queries."""
    lengths = (1, 7, 33, 64, 65, 96, 97)
    all_agree(*(Case(Size(2, 2 * group, 2, n, 301, 64, 64), "bfloat16", ("causal",)) for n in lengths))


@pytest.mark.parametrize("group", [2, 8, 16])
@pytest.mark.parametrize("dim", [128, 256])
def test_groups_with_every_option(group: int, dim: int) -> None:
    names = ("causal window", "alibi of batch", "softcap", "sink", "kv_lengths")
    sizes = [Size(3, 2 * group, 2, n, 301, dim, dim) for n in (1, 5, 63, 65)]
    all_agree(*(Case(size, "bfloat16", names) for size in sizes))
    all_agree(*(Case(size, "bfloat16", ("causal",), wide_out=True) for size in sizes))


SEQUENCES = {
    "of all lengths": ((0, 0), (1, 1), (64, 64), (0, 7), (128, 1), (5, 0), (193, 129), (192, 385), (0, 0)),
    "of none first": ((0, 0), (0, 3), (0, 0), (200, 200)),
    "of one": tuple((1, n) for n in (1, 0, 64, 129, 300)),
    "of whole tiles": ((384, 384), (192, 256), (128, 128), (64, 64)),
    "of nothing but one": ((0, 0), (0, 0), (65, 65), (0, 0), (0, 0)),
}


@each_dim
@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences(name: str, dim: int) -> None:
    size = Size.packed(4, 2, dim, dim, *SEQUENCES[name])
    all_agree(*(Case(size, "bfloat16", names) for names in (("plain",), ("causal",), ("window", "sink"))))
    all_agree(Case(size, "bfloat16", ("kv_lengths", "alibi of batch")), Case(size, "bfloat16", wide_out=True))


# ---- jumps ----


def stairs(levels: list[int], dim: int, dtype: str) -> Call:
    """Scores at these levels, in base 2, for 128 keys each; every other query sees them reversed."""
    rng = np.random.default_rng(len(levels))
    n_q, n_k = 130, 128 * len(levels)
    q, k, v, dout = (rng.standard_normal((1, 2, n, dim)) for n in (n_q, n_k, n_k, n_q))
    q, k = q / dim, k / dim
    q[..., 0], k[..., 0] = np.where(np.arange(n_q) % 2, -1.0, 1.0), np.repeat(levels, 128) * math.log(2)
    arrays = [narrow(x, dtype) for x in (q, k, v)]
    return Call(*arrays, {"scale": 1.0}, narrow(dout, dtype), np.zeros((1, 2, n_q), np.float32))


def jump(call: Call, runner: Runner = CUDA) -> None:
    """Compare with the oracle. Scores are large here, and the matrix unit truncates digits that others round."""
    exact = truth_of(call)
    finite = exact.lse[np.isfinite(exact.lse)]
    exact.error["lse"] += float(np.abs(finite).max(initial=0.0)) * 2.0**-22
    check(call, exact, runner, backward=False)


@contextmanager
def flags() -> Iterator[list[Tensor]]:
    """The nonfinite flags of the calls within it: not 0 if a tile was spoiled and recomputed."""
    made: list[Tensor] = []

    def acquire(device: torch.device) -> Any:
        found = work_counters.acquire_counters(device)
        found.flags.zero_()

        def release() -> None:
            made.append(found.flags.clone())
            found.release()

        return SimpleNamespace(counters=found.counters, flags=found.flags, release=release)

    with mock.patch.object(forward, "acquire_counters", acquire):
        yield made


GENTLE = ([0, 10], [0, 50], [0, 100], [0, 100, 0], [100, 0, 100, 0], [0, 100, 200, 300, 400], [0, 30, 60, 150])
STEEP = ([0, 300], [0, 0, 300, 0], [0, 2000], [300, 0, 300, 0, 300], [0, 100, 300])


@halves
@each_dim
@pytest.mark.parametrize("levels", GENTLE, ids=str)
def test_jumps_that_a_weight_can_hold(levels: list[int], dim: int, dtype: str) -> None:
    with flags() as made:
        jump(stairs(levels, dim, dtype))
    assert made and not any(x.any() for x in made), "nothing had to be made anew"


@halves
@each_dim
@pytest.mark.parametrize("levels", STEEP, ids=str)
def test_jumps_past_the_largest_weight(levels: list[int], dim: int, dtype: str) -> None:
    """In bfloat16 no maximum is searched after the first tile: these overflow, and are recomputed."""
    with flags() as made:
        jump(stairs(levels, dim, dtype))
    assert any(x.any() for x in made) == (dtype == "bfloat16")


@halves
@pytest.mark.parametrize("level", [-2000, -250, -100, 100, 250, 2000])
def test_rows_that_do_not_see_their_first_tile(level: int, dtype: str) -> None:
    """Their reference is 0 until they see a key, and scores may be far from that."""
    call = stairs([level] * 4, 64, dtype)
    for band in (ft.Band(20, 0, 300), ft.Band(90, 90, 200), ft.Band(1 << 40, 0, 130)):
        jump(replace(call, options=call.options | {"band": band}))


@halves
def test_sinks_far_from_the_scores(dtype: str) -> None:
    call = build(Case(Size(1, 4, 4, 130, 300, 64, 64), dtype, ("causal",)))
    sink = np.array([300.0, -300.0, -np.inf, 0.0], np.float32)
    jump(replace(call, options=call.options | {"sink": sink}))


# ---- memory that is not in one piece ----


def views(kind: str, batch: int, heads: int, n: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v that lie in a larger tensor of NaN."""
    torch.manual_seed(0)
    room = {
        "one projection": (batch, n, 3, heads, dim),
        "rows first": (3, batch, n, heads, dim),
        "batch inside": (3, n, batch, heads, dim),
        "some sequences": (3, 2 * batch + 1, heads, n, dim),
        "some heads": (3, batch, 3 * heads, n, dim),
        "some rows": (3, batch, heads, n + 9, dim),
        "some columns": (3, batch, heads, n, dim + 24),
    }[kind]
    x = torch.full(room, torch.nan, device="cuda", dtype=torch.bfloat16)
    match kind:
        case "one projection":
            parts = [y.transpose(1, 2) for y in x.unbind(2)]
        case "rows first":
            parts = [y.transpose(1, 2) for y in x]
        case "batch inside":
            parts = [y.permute(1, 2, 0, 3) for y in x]
        case "some sequences":
            parts = list(x[:, 1::2])
        case "some heads":
            parts = list(x[:, :, 1::3])
        case "some rows":
            parts = list(x[:, :, :, 4 : 4 + n])
        case _:
            parts = list(x[..., 8 : 8 + dim])
    for y in parts:
        y.copy_(torch.randn(y.shape, device="cuda"))
    q, k, v = parts
    assert q.shape == (batch, heads, n, dim) and not q.is_contiguous()
    return q, k, v


@each_dim
@pytest.mark.parametrize(
    "kind",
    [
        "one projection",
        "rows first",
        "batch inside",
        "some sequences",
        "some heads",
        "some rows",
        "some columns",
    ],
)
def test_views(kind: str, dim: int) -> None:
    """The same bits as for the same numbers in one piece."""
    for n in (65, 450):
        q, k, v = views(kind, 2, 3, n, dim)
        for options in ({}, {"causal": True}):
            whole = ft.attention(*(x.contiguous() for x in (q, k, v)), return_lse=True, **options)
            found = ft.attention(q, k, v, return_lse=True, **options)
            assert all(same_bits(x, y) for x, y in zip(found, whole, strict=True))
            assert found[0].isfinite().all()


# ---- races ----

RAGGED = (300, 0, 17, 700, 64, 1, 450)
REPEATED = {
    "plain": Case(Size(2, 8, 8, 1025, 1025, 64, 64), "bfloat16"),
    "causal": Case(Size(2, 8, 4, 1025, 1025, 128, 128), "bfloat16", ("causal",)),
    "wide": Case(Size(2, 4, 4, 577, 1025, 256, 256), "bfloat16", ("causal",)),
    "window": Case(Size(2, 8, 8, 1025, 1025, 64, 64), "bfloat16", ("causal window",)),
    "few queries": Case(Size(4, 32, 4, 5, 1025, 128, 128), "bfloat16", ("kv_lengths",)),
    "packed": Case(Size.packed(8, 8, 64, 64, *((n, n) for n in RAGGED)), "bfloat16", ("causal",)),
    "float16": Case(Size(2, 8, 8, 577, 577, 128, 128), "float16", ("causal",)),
    "ragged": Case(Size(3, 8, 8, 1000, 1000, 128, 128), "bfloat16"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_two_hundred_runs(name: str) -> None:
    given = Given(build(REPEATED[name]), "cuda")
    assert given.refusal("cuda") is None
    first = [x.clone() for x in given.forward()]
    with other_work():
        for turn in range(20):
            for found in [given.forward() for _ in range(10)]:
                assert all(same_bits(x, y) for x, y in zip(found, first, strict=True)), f"of runs {10 * turn} and on"


@pytest.mark.parametrize("name", REPEATED)
def test_two_hundred_gradients_in_order(name: str) -> None:
    """Programs add to dQ in turns, and none before its own."""
    in_order(build(REPEATED[name]), turns=40)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATED)
def test_four_thousand_gradients_in_order(name: str) -> None:
    """Errors that occur once in a thousand runs show too."""
    in_order(build(REPEATED[name]), turns=800)


@pytest.mark.parametrize("programs", [3, 10])
@pytest.mark.parametrize("name", REPEATED)
def test_few_programs_take_all_tasks(name: str, programs: int) -> None:
    """One task after the other in each program: the same bits as with many programs, and on any Hopper GPU."""
    call = build(REPEATED[name])
    given = Given(replace(call, options=call.options | {"deterministic": True}), "cuda")
    want = given.step()
    with unprepared(), mock.patch.object(gpu, "processors", lambda _device: programs):
        for _ in range(3):
            assert all(same_bits(x, y) for x, y in zip(given.step(), want, strict=True))


def test_gradients_in_order_where_rows_end_before_the_band() -> None:
    """In the last tile of queries, some keys are seen only by rows that do not exist: those have no turn."""
    call = build(Case(Size(2, 8, 8, 388, 1024, 128, 128), "bfloat16"))
    in_order(replace(call, options=call.options | {"band": ft.Band(FAR, 0, -10)}), turns=10)


@pytest.mark.parametrize("turns", [40, pytest.param(800, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dim", "tile"), [(64, 128), (128, 128), (256, 64)])
def test_order_sensitive_sums(dim: int, tile: int, turns: int) -> None:
    """Two tasks that change places show; with ordinary numbers they would hardly do so in 16 bits."""
    in_order(order_sensitive(3, 8, 1000, dim, tile), turns)


def in_order(call: Call, turns: int) -> None:
    """Check that gradients of five runs per turn have the same bits."""
    given = Given(replace(call, options=call.options | {"deterministic": True}), "cuda")
    first = [x.clone() for x in given.step()]
    with other_work():
        for turn in range(turns):
            for found in [given.step() for _ in range(5)]:
                if not all(same_bits(x, y) for x, y in zip(found, first, strict=True)):
                    pytest.fail(f"of runs {5 * turn} and on: {[*map(difference, found, first)]}")


def difference(x: Tensor, y: Tensor) -> str:
    """Details that tell causes apart: how many elements differ, of which heads and rows, and by how much."""
    apart = (x != y).nonzero()
    if not len(apart):
        return "same"
    ends = ", ".join(
        f"{low} to {high}" for low, high in zip(apart.amin(0).tolist(), apart.amax(0).tolist(), strict=True)
    )
    most = float((x.double() - y.double()).abs().max())
    return f"{len(apart)} elements at {ends}, {most:.3g} of {float(y.abs().max()):.3g}"


LARGE = """
import json, sys, torch, flashtile as ft
torch.manual_seed(0)
def normal(*shape): return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
(b, h, kv, n, d), options = json.loads(sys.argv[1])
lengths = options.pop("packed", None)
options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
if lengths:
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    leaves = tuple(normal(int(cu[-1]), x, d) for x in (h, kv, kv))
    def run(**how): return ft.attention_packed(*leaves, cu, cu, **how, **options)
else:
    leaves = tuple(normal(b, x, n, d) for x in (h, kv, kv))
    def run(**how): return ft.attention(*leaves, **how, **options)
ways = dict(backend="triton"), dict(backend="gluon"), dict(backend="gluon", deterministic=True)
outs = [run(**how) for how in ways]
dout = torch.randn_like(outs[0])
want, *others = ((out, *torch.autograd.grad(out, leaves, dout)) for out in outs)
for found in others:
    for x, y in zip(found, want):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
print("done")
"""
LARGE_CALLS: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "long": ((1, 16, 16, 32768, 128), {"causal": True}),
    "grouped": ((2, 32, 8, 16384, 64), {"causal": True}),
    "wide": ((1, 8, 8, 16384, 256), {}),
    "window": ((4, 16, 16, 8191, 64), {"window": (1000, 0)}),
    "many short": ((64, 16, 16, 513, 128), {"causal": True}),
    "packed": ((0, 16, 16, 0, 128), {"causal": True, "packed": [n * 37 % 1009 for n in range(200)]}),
    "a tile and a row": ((133, 1, 1, 193, 64), {}),
}


@pytest.mark.parametrize("name", LARGE_CALLS)
def test_large_calls_come_back(name: str) -> None:
    """In a process that can be killed: warps in a deadlock would wait for ever."""
    run = python("-c", LARGE, json.dumps(LARGE_CALLS[name]), timeout=240)
    assert run.returncode == 0 and run.stdout.endswith("done\n"), run.stdout + run.stderr[-3000:]


@pytest.mark.parametrize("alike", [True, False], ids=["the same call", "two calls"])
@pytest.mark.parametrize("work", [Given.forward, Given.step], ids=["forward", "gradients"])
def test_two_streams_at_once(work: Callable[[Given], tuple[Tensor, ...]], alike: bool) -> None:
    """Fifty launches on each: programs of one stream must not take tasks of the other."""
    cases = [build(REPEATED[name]) for name in ("causal", "causal" if alike else "packed")]
    calls = [Given(replace(call, options=call.options | {"deterministic": True}), "cuda") for call in cases]
    alone = [work(given) for given in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((n, work(calls[n])))
    torch.cuda.synchronize()
    for n, found in results:
        assert all(same_bits(x, y) for x, y in zip(found, alone[n], strict=True)), n


@pytest.mark.parametrize("work", ["forward", "step"])
@pytest.mark.parametrize("name", ["causal", "packed"])
def test_a_graph_beside_the_stream_it_was_captured_on(name: str, work: str) -> None:
    """With a fixed order, so that gradients have the same bits too."""
    call = build(REPEATED[name])
    replay_beside(Given(replace(call, options=call.options | {"deterministic": True}), "cuda"), work)


@pytest.mark.parametrize("work", ["forward", "step"])
def test_an_abandoned_capture(work: str) -> None:
    """Launches that were captured and never ran leave nothing behind that later ones would rely on."""
    given = Given(build(REPEATED["causal"]), "cuda")
    function = getattr(given, work)
    want = [x.clone() for x in function()]
    with pytest.raises(ZeroDivisionError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        function()
        raise ZeroDivisionError
    for _ in range(3):
        assert given.alike(function(), want)


# ---- beside a peer ----


@each_dim
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_gradients_are_about_as_exact_as_those_of_cudnn(causal: bool, dim: int) -> None:
    """By the root mean square of the difference from float64."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 2, 1024, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    attention = torch.nn.functional.scaled_dot_product_attention

    def gradients(run: Any, *inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return [x.double() for x in torch.autograd.grad(run(*leaves), leaves, dout.to(inputs[0].dtype))]

    def peer(*leaves: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return attention(*leaves, is_causal=causal)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = gradients(lambda *leaves: attention(*leaves, is_causal=causal), *(x.double() for x in (q, k, v)))
    ours = gradients(lambda *leaves: ft.attention(*leaves, causal=causal), q, k, v)
    theirs = gradients(peer, q, k, v)
    for name, x, y, z in zip("qkv", ours, theirs, exact, strict=True):
        assert (x - z).norm() <= 1.1 * (y - z).norm(), f"d{name}"


# ---- selection ----


def test_auto_takes_it_where_it_suits() -> None:
    def chosen(*shape: int, dtype: torch.dtype = torch.bfloat16, keys: int = 4096, **options: Any) -> str:
        q = torch.empty(shape, device="cuda", dtype=dtype)
        k = torch.empty(*shape[:2], keys, shape[3], device="cuda", dtype=dtype)
        return dispatch.choose(describe(q, k, k, **options), "auto", "cuda").name

    assert chosen(2, 16, 4096, 128, causal=True) == "gluon"
    assert chosen(2, 16, 4096, 64, dtype=torch.float16) == "gluon"
    assert chosen(2, 16, 1, 128) == "triton"
    assert chosen(2, 16, 4096, 128, dtype=torch.float32) == "triton"
    assert chosen(2, 16, 4096, 128, dropout=0.1) == "triton"
    assert chosen(2, 16, 4096, 512) == "triton"


# ---- a thousand ----

KINDS = (
    Kind("bfloat16", (64, 64), 1),
    Kind("bfloat16", (64, 64), 2, ("band",), place="fenced"),
    Kind("bfloat16", (64, 64), 4, ("window", "sink"), layout="rows first"),
    Kind("bfloat16", (64, 64), 8, ("kv_lengths", "softcap"), place="fenced"),
    Kind("bfloat16", (64, 64), 3, ("window", "alibi")),
    Kind("bfloat16", (64, 64), 2, ("window",), packed=True, place="fenced"),
    Kind("bfloat16", (64, 64), 1, ("band", "kv_lengths", "alibi"), packed=True),
    Kind("bfloat16", (128, 128), 1, ("window",), place="fenced"),
    Kind("bfloat16", (128, 128), 4, ("band", "softcap"), layout="rows first"),
    Kind("bfloat16", (128, 128), 8, ("kv_lengths",), packed=True, place="fenced"),
    Kind("bfloat16", (128, 128), 2, ("window", "kv_lengths", "sink", "alibi", "softcap", "scale")),
    Kind("bfloat16", (128, 64), 2, ("window",)),
    Kind("bfloat16", (64, 128), 1, ("band",), packed=True),
    Kind("bfloat16", (192, 128), 1, ("window", "softcap")),
    Kind("bfloat16", (256, 256), 2, ("band", "sink"), packed=True),
    Kind("bfloat16", (256, 256), 4, ("window",), place="fenced"),
    Kind("bfloat16", (80, 96), 2, ("band", "scale")),
    Kind("float16", (64, 64), 1, ("window", "alibi", "softcap")),
    Kind("float16", (128, 128), 2, ("band", "kv_lengths"), place="fenced"),
    Kind("float16", (256, 256), 1, ("window", "sink"), packed=True),
)
CHUNKS = 2
assert len(KINDS) * CHUNKS * 25 >= 1000


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_thousand_problems(kind: Kind, chunk: int) -> None:
    """Lengths from 1 up, unlike those of test_random.py."""
    try_some(kind, 2 + chunk, 25, (1, 700))
