"""Shards of any call, by batch and heads over one or two axes of a mesh, give the results of the whole."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import flashtile as ft
from flashtile.numerics.dtypes import widen
from flashtile.pytorch.sharding import Split
from tests.support.grid import Call
from tests.test_random_problems import calls

KINDS = st.sampled_from(["batch", "heads", None])


@dataclass
class Placement:
    """Like torch's Shard; a dim of None is Replicate."""

    dim: int | None


@dataclass
class Spec:
    """What Split reads of a DTensor."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


def mesh_of(*shape: int) -> Any:
    """What Split reads of a DeviceMesh."""
    return SimpleNamespace(shape=shape)


def sharded(x: Any, placements: Any, mesh: tuple[int, ...], rank: tuple[int, ...]) -> Any:
    """A rank's shard of an array, as torch.chunk() would cut it, mesh axis by mesh axis."""
    for placement, size, at in zip(placements, mesh, rank, strict=True):
        axis = getattr(placement, "dim", None)
        if axis is not None:
            step = -(-x.shape[axis] // size) or 1
            keep = [slice(None)] * x.ndim
            keep[axis] = slice(at * step, (at + 1) * step)
            x = x[tuple(keep)]
    return x


def assembled(parts: dict[tuple[int, ...], Any], placements: Any, mesh: tuple[int, ...]) -> Any:
    """The array of which these are the shards, by rank: concatenated, summed, or the first of equal ones."""
    for placement, size in zip(reversed(placements), reversed(mesh), strict=True):
        ranks = {rank[:-1] for rank in parts}
        each = {rank: [parts[(*rank, n)] for n in range(size)] for rank in ranks}
        axis = getattr(placement, "dim", None)
        if axis is not None:
            parts = {rank: np.concatenate(found, axis) for rank, found in each.items()}
        else:
            partial = type(placement).__name__ == "Partial"
            parts = {rank: sum(found) if partial else found[0] for rank, found in each.items()}
    return parts[()]


def without_rounding(call: Call) -> dict[str, Any]:
    """The arrays of a call by name, floats in float64."""
    found = {"q": call.q, "k": call.k, "v": call.v, **call.packed, **call.options}
    found = {name: x for name, x in found.items() if isinstance(x, np.ndarray)}
    return {name: x if x.dtype.kind in "bi" else widen(x).astype(np.float64) for name, x in found.items()}


def spans_of(data: Any, q: Any, n_k: int) -> Any:
    """Random limits of one span a query, for some or all sequences and heads."""
    shape = [n if data.draw(st.booleans()) else 1 for n in q.shape[:3]]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    return ft.Spans(rng.integers(0, n_k + 1, shape), rng.integers(0, n_k + 1, shape)).limits


def run(arrays: dict[str, Any], numbers: dict[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
    """The results and gradients of a call, by name."""
    options = {name: ft.Spans.of(x) if name == "spans" else x for name, x in arrays.items()}
    qkv = [options.pop(name) for name in ("q", "k", "v")]
    cu = {name: options.pop(name) for name in ("cu_q", "cu_k") if name in options}
    attend = ft.attention_packed if cu else ft.attention
    out, lse = attend(*qkv, *cu.values(), return_lse=True, backend="tiles", **options, **numbers)
    grads = ft.attention_backward(dout, *qkv, out, lse, dlse=dlse, backend="tiles", **cu, **options, **numbers)
    names = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
    return {name: x for name, x in zip(names, (out, lse, *grads), strict=True) if x is not None}


@given(calls(), st.lists(st.tuples(st.sampled_from([2, 3]), KINDS), min_size=1, max_size=2), st.data())
@settings(max_examples=max(50, settings().max_examples // 10))
def test_shards_give_the_results_of_the_whole(call: Call, wanted: list[tuple[int, str | None]], data: Any) -> None:
    kinds = [kind if kind == "heads" or not call.packed else None for _, kind in wanted]
    mesh = tuple(size for size, _ in wanted)
    assume(call.k.shape[1] % int(np.prod([n for n, kind in zip(mesh, kinds, strict=True) if kind == "heads"])) == 0)
    arrays = without_rounding(call)
    if not call.packed and data.draw(st.booleans()):
        arrays["spans"] = spans_of(data, call.q, call.k.shape[2])
    axis = {None: None, "batch": 0, "heads": 1}
    by = tuple(Placement(axis[kind]) for kind in kinds)
    first = data.draw(st.sampled_from(["q", "k", "v"]))  # one tensor decides for all
    nothing = (Placement(None),) * len(mesh)
    split = Split.of({n: Spec(x.shape, by if n == first else nothing) for n, x in arrays.items()}, mesh_of(*mesh))
    assert split.by == kinds

    numbers = {n: x for n, x in call.options.items() if n not in (*arrays, "out_dtype", "dropout", "seed")}
    dout, dlse = (widen(x).astype(np.float64) for x in (call.dout, call.dlse))
    parts = {}
    for rank in itertools.product(*map(range, mesh)):
        mine = {name: sharded(x, split.placements(name), mesh, rank) for name, x in arrays.items()}
        of_rows = (sharded(x, split.placements("q"), mesh, rank) for x in (dout, dlse))
        parts[rank] = run(mine, numbers, *of_rows)
    for name, want in run(arrays, numbers, dout, dlse).items():
        of = name[1:] if name.startswith("d") else "q"
        placements = split.placements_of_gradient(of) if of in ("bias", "sink") else split.placements(of)
        got = assembled({rank: found[name] for rank, found in parts.items()}, placements, mesh)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def call_of(**placements: int) -> dict[str, Spec]:
    """A call on a mesh of two, with these tensors split by these axes."""
    shapes = {"q": (2, 4, 8, 16), "k": (2, 2, 8, 16), "v": (2, 2, 8, 16), "bias": (1, 4, 8, 8), "kv_lengths": (2,)}
    return {name: Spec(shape, (Placement(placements.get(name)),)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("name", "axis", "words"),
    [
        ("q", 2, "a DTensor split by batch or heads"),
        ("k", 2, "a DTensor split by batch or heads"),
        ("v", 3, "a DTensor split by batch or heads"),
        ("bias", 2, "a DTensor split by heads"),
        ("bias", 0, "a DTensor split by heads"),  # this axis is broadcast
        ("kv_lengths", 1, "a DTensor split by batch"),
    ],
)
def test_other_shards_are_refused(name: str, axis: int, words: str) -> None:
    with pytest.raises(ft.UnsupportedError, match=rf"^{name}: expected {words}, got .*flashtile.distributed.attention"):
        Split.of(call_of(**{name: axis}), mesh_of(2))


def test_packed_sequences_have_shards_of_heads_only() -> None:
    rows, starts = Spec((8, 2, 16), (Placement(0),)), Spec((3,), (Placement(None),))
    with pytest.raises(
        ft.UnsupportedError, match=r"^q: expected a DTensor split by heads, got .*distributed.attention"
    ):
        Split.of({"q": rows, "k": rows, "v": rows, "cu_q": starts, "cu_k": starts}, mesh_of(2))
    with pytest.raises(ft.UnsupportedError, match=r"^cu_q: expected a replicated DTensor, got"):
        whole, split = Spec((8, 2, 16), (Placement(None),)), Spec((3,), (Placement(0),))
        Split.of({"q": whole, "k": whole, "v": whole, "cu_q": split, "cu_k": starts}, mesh_of(2))


def test_groups_of_heads_are_not_split() -> None:
    with pytest.raises(ft.UnsupportedError, match=r"^k: expected a number of heads that 4 shards .* divide, got 2"):
        Split.of(call_of(q=1), mesh_of(4))


def test_plain_tensors_do_not_import_dtensor() -> None:
    code = """if True:
        import sys, torch, flashtile
        x = torch.ones(1, 2, 4, 8, requires_grad=True)
        flashtile.attention(x, x, x).sum().backward()
        loaded = "torch.distributed.tensor" in sys.modules, "flashtile.distributed" in sys.modules
        print(*loaded)
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
