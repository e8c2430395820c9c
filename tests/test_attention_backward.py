"""attention_backward(): blocks of the keys of a whole attention, float32 gradients, and buffers that are added to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile as ft
from flashtile.host.arrays import add
from flashtile.numerics.dtypes import name_of, narrow, widen
from tests.support.grid import Call, Case, Size, build
from tests.support.key_blocks import key_blocks
from tests.support.runners import TENSORS_ONLY, why_missing

NAMES = ("dq", "dk", "dv", "dbias", "dsink")
SIZE = Size(2, 4, 2, 37, 61, 16, 12)
DECODE = Size(2, 4, 2, 2, 61, 16, 12)
CUTS = [0, 9, 9, 40]  # two empty blocks
OPTIONS = (
    *("plain", "causal", "window", "band", "band far behind", "spans", "spans of rows", "mask", "mask with empty rows"),
    *("bias", "bias of keys", "bias of rows", "bias wide", "alibi", "softcap", "sink", "kv_lengths", "scale negative"),
)
COMBINATIONS = (
    ("causal", "bias", "sink", "alibi", "softcap"),
    ("window", "mask of keys", "bias of keys", "sink"),
    ("spans of batch", "kv_lengths", "bias of batch"),
)
BACKENDS = [
    pytest.param(name, marks=[pytest.mark.skip(reason=reason)] if (reason := why_missing(name)) else [])
    for name in ("native", "tiles", "reference", "sdpa")
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def attention(backend: str, call: Call) -> tuple[Any, Any]:
    (q, k, v), options, back = converted(backend, (call.q, call.k, call.v), call.options)
    results: Any = ft.attention(q, k, v, return_lse=True, backend=backend, **options)
    return back(results[0]), back(results[1])


def gradients(backend: str, call: Call, out: Any, lse: Any, **more: Any) -> ft.Grads:
    arrays = (call.dout, call.q, call.k, call.v, out, lse, call.dlse)
    (*positional, dlse), options, back = converted(backend, arrays, {**call.options, **call.packed, **more})
    grads = ft.attention_backward(*positional, dlse=dlse, backend=backend, **options)
    return ft.Grads(*map(back, grads))


def converted(backend: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any], Any]:
    """As tensors that share the arrays' memory for a backend of tensors alone; and what makes arrays of results."""
    if backend not in TENSORS_ONLY:
        return [*arrays], options, lambda x: x
    torch = pytest.importorskip("torch")
    from flashtile.pytorch.bridge import to_numpy

    def tensor(x: Any) -> Any:
        if isinstance(x, ft.Grads):
            return ft.Grads(*map(tensor, x))
        if not isinstance(x, np.ndarray):
            return x
        x = x if x.flags.writeable else x.copy()
        return (
            torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
            if name_of(x.dtype) == "bfloat16"
            else torch.from_numpy(x)
        )

    return (
        [*map(tensor, arrays)],
        {name: tensor(x) for name, x in options.items()},
        lambda x: None if x is None else to_numpy(x),
    )


def buffers(call: Call, dtype: str) -> ft.Grads:
    """Zeros for every gradient of a call."""
    inputs = (call.q, call.k, call.v, call.options.get("bias"), call.options.get("sink"))
    return ft.Grads(*(None if x is None else np.zeros(x.shape, dtype) for x in inputs))


def sum_of_blocks(backend: str, call: Call, out: Any, lse: Any, cuts: list[int], **more: Any) -> ft.Grads:
    """Add the gradients of all blocks, each into its part of the same buffers."""
    total = buffers(call, "float64" if call.q.dtype == np.float64 else "float32")
    for block in key_blocks(call.k, call.v, call.options, call.q.shape[-2], cuts):
        dbias = total.dbias
        if dbias is not None and dbias.shape[-1] > 1:
            dbias = dbias[..., block.keys]
        dsink = total.dsink if "sink" in block.options else None
        into = ft.Grads(total.dq, total.dk[..., block.keys, :], total.dv[..., block.keys, :], dbias, dsink)
        part = Call(call.q, block.k, block.v, block.options, call.dout, call.dlse)
        found = gradients(backend, part, out, lse, into=into, **more)
        for x, buffer in zip(found, into, strict=True):
            assert x is buffer or backend in TENSORS_ONLY
    return total


def assert_sums_to_the_whole(backend: str, call: Call, cuts: list[int], tolerance: float = 1e-12) -> None:
    row = ft.dispatch.named(backend)
    if reason := row.why_not(call.problem(), "cpu", backend in TENSORS_ONLY):
        pytest.skip(reason)
    parts = key_blocks(call.k, call.v, call.options, call.q.shape[-2], cuts)
    problems = (Call(call.q, x.k, x.v, x.options, call.dout, call.dlse).problem() for x in parts)
    if any(row.why_not(p, "cpu", backend in TENSORS_ONLY) for p in problems):
        pytest.skip(f"{backend} takes not every block")
    out, lse = attention(backend, call)
    whole = gradients(backend, call, out, lse)
    for name, x, y in zip(NAMES, sum_of_blocks(backend, call, out, lse, cuts), whole, strict=True):
        if y is not None:
            np.testing.assert_allclose(x, y, tolerance, tolerance * np.abs(y).max(initial=1e-3), err_msg=name)


@every_backend
@pytest.mark.parametrize("options", [*((name,) for name in OPTIONS), *COMBINATIONS], ids="+".join)
def test_blocks_of_keys_sum_to_the_whole(backend: str, options: tuple[str, ...]) -> None:
    for size in (SIZE, DECODE):
        assert_sums_to_the_whole(
            backend, build(Case(size, "float64", options)), [20, 45] if backend == "sdpa" else CUTS
        )


@pytest.mark.parametrize("backend", BACKENDS[:2])
@settings(max_examples=20)
@given(st.data())
def test_random_blocks_of_keys_sum_to_the_whole(backend: str, data: st.DataObject) -> None:
    options = data.draw(st.lists(st.sampled_from(OPTIONS[5:]), max_size=3, unique=True))
    size = Size(1, 2, 1, data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300)), 8, 8)
    cuts = sorted(data.draw(st.lists(st.integers(0, size.n_k), max_size=4)))
    assert_sums_to_the_whole(backend, build(Case(size, "float64", tuple(options))), cuts)


@every_backend
@pytest.mark.parametrize("size", [2.0**7, 2.0**20])
def test_blocks_of_rows_with_a_coarse_lse(backend: str, size: float) -> None:
    """Their lse is not recomputed from a block alone: every weight would be too large."""
    call = build(Case(SIZE, "float64", ("plain",)))
    rng = np.random.default_rng(0)
    q, k = (rng.integers(0, 2, x.shape) * factor for x, factor in ((call.q, 1.0), (call.k, size)))
    assert_sums_to_the_whole(backend, Call(q, k, call.v, {"scale": 1.0}, call.dout, call.dlse), [20, 45], 1e-9)


@every_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_coarse_lse_of_the_keys_themselves_is_still_recomputed(backend: str, dtype: str) -> None:
    """As without blocks: rows of a numeric mask, whose lse has no bits left for the number of keys."""
    call = build(Case(SIZE, dtype, ("plain",)))
    bias = np.zeros((1, 1, SIZE.n_q, 1), np.float32)
    bias[:, :, ::3] = np.finfo(np.float32).min
    call = Call(call.q, call.k, call.v, {"bias": bias}, call.dout, None)
    out, lse = attention(backend, call)
    dv = gradients(backend, call, out, lse, grad_dtype="float32").dv
    exact = widen(call.dout, np.float64).reshape(2, 2, 2, SIZE.n_q, -1)[:, :, :, ::3].sum(2) / SIZE.n_k
    plain = np.delete(np.arange(SIZE.n_q), np.s_[::3])
    rest = Call(call.q[:, :, plain], call.k, call.v, {}, call.dout[:, :, plain], None)
    others = gradients("reference", rest, *attention("reference", rest), grad_dtype="float32").dv
    error = np.abs(dv - others - exact.sum(2)[:, :, None]).max()
    assert error < (1e-5 if dtype == "float32" else 0.05)


@every_backend
def test_a_block_hides_what_is_not_finite_and_sees_no_key_for_some_rows(backend: str) -> None:
    call = build(Case(SIZE, "float64", ("causal",)))
    k, v = call.k.copy(), call.v.copy()
    k[:, :, -1] = v[:, :, -1] = np.nan  # the last query alone sees it
    call = Call(call.q, k, v, {"causal": True}, call.dout, None)
    out, lse = attention(backend, call)
    whole = gradients(backend, call, out, lse)
    if backend == "sdpa":  # each block has a band that torch's kernel lacks
        return
    total = sum_of_blocks(backend, call, out, lse, [20, 60])
    for x, y in zip(total[:3], whole[:3], strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        np.testing.assert_allclose(x, y, 1e-12, 1e-12)


@every_backend
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_that_are_not_rounded(backend: str, dtype: str) -> None:
    call = build(Case(SIZE, dtype, ("bias",)))
    out, lse = attention(backend, call)
    exact = build(Case(SIZE, "float64", ("bias",)))
    wide = [widen(x, np.float64) for x in (call.q, call.k, call.v)]
    exact = Call(
        *wide,
        {"bias": widen(call.options["bias"], np.float64)},
        widen(call.dout, np.float64),
        widen(call.dlse, np.float64),
    )
    truth = gradients("reference", exact, *attention("reference", exact))
    rounded, found = (gradients(backend, call, out, lse, grad_dtype=x) for x in (None, np.float32))
    for name, x, y, z in zip(NAMES[:4], found, rounded, truth, strict=False):
        assert x.dtype == np.float32 and name_of(y.dtype) == dtype
        # Rounding the result is one error of many: the products round P, dS and the inputs' sums too.
        assert rms(x - z) < rms(widen(y, np.float64) - z), name


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def with_gaps(x: Any, order: tuple[int, ...]) -> tuple[Any, Any]:
    """A copy of x whose axes but the last lie in this order in memory, with gaps between rows; and the memory."""
    order = (*order, x.ndim - 1)
    room = narrow(np.full([2 * x.shape[axis] for axis in order], np.nan), name_of(x.dtype))
    view = room[tuple(slice(0, n) for n in (x.shape[axis] for axis in order))].transpose(np.argsort(order))
    view[...] = x
    return view, room


@every_backend
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_buffers_are_added_to(backend: str, dtype: str, order: tuple[int, ...]) -> None:
    options = ("bias",) if backend == "sdpa" else ("bias", "sink", "kv_lengths", "causal")
    call = build(Case(SIZE, dtype, options))
    out, lse = attention(backend, call)
    rng = np.random.default_rng(1)
    for grad_dtype in (None, "float64" if dtype == "float64" else "float32"):
        fresh = gradients(backend, call, out, lse, grad_dtype=grad_dtype)
        before = [None if x is None else narrow(rng.standard_normal(x.shape), name_of(x.dtype)) for x in fresh]
        pairs = [(x, x) if x is None or x.ndim < 4 else with_gaps(x, order) for x in before]
        into = [None if x is None else x if x.ndim == 4 else x.copy() for x, _ in pairs]
        found = gradients(backend, call, out, lse, grad_dtype=grad_dtype, into=ft.Grads(*into))
        real = np.float64 if dtype == "float64" else np.float32
        eps = {"float64": 1e-15, "float32": 1e-6}.get("float32" if grad_dtype == "float32" else dtype, 1e-2)
        for x, y, start, buffer in zip(found, fresh, before, into, strict=True):
            if y is None:
                assert x is None
                continue
            want = widen(start, real) + widen(y, real)
            np.testing.assert_allclose(widen(buffer, real), want, eps, 4 * eps)
            np.testing.assert_array_equal(widen(x, real), widen(buffer, real))
        for buffer, room in pairs:
            assert buffer is None or np.isnan(widen(room, real)).sum() == room.size - buffer.size


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_some_buffers_and_packed_sequences(backend: str) -> None:
    call = build(Case(Size.packed(4, 2, 16, 12, (9, 30), (20, 11), (0, 5), (3, 0)), "float32", ("causal",)))
    out, lse = ft.attention_packed(call.q, call.k, call.v, **call.packed, causal=True, return_lse=True, backend=backend)
    fresh = gradients(backend, call, out, lse)
    dk = np.ones_like(fresh.dk)
    found = gradients(backend, call, out, lse, into=ft.Grads(None, dk, None, None, None))
    assert found.dk is dk
    np.testing.assert_array_equal(found.dq, fresh.dq)
    np.testing.assert_allclose(dk, 1 + fresh.dk, 1e-6, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_buffers_in_the_other_order_of_axes(backend: str) -> None:
    call = build(Case(SIZE, "float32", ("plain",)))
    out, lse = attention(backend, call)
    fresh = gradients(backend, call, out, lse)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (call.dout, call.q, call.k, call.v, out)]
    into = ft.Grads(*(np.zeros_like(x) for x in turned[1:4]), None, None)
    given = {"dlse": call.dlse.swapaxes(1, 2), "layout": "bnhd", "backend": backend}
    found = ft.attention_backward(*turned, lse.swapaxes(1, 2), into=into, **given)
    for x, buffer, y in zip(found[:3], into[:3], fresh[:3], strict=True):
        assert x is buffer
        np.testing.assert_array_equal(x, y.swapaxes(1, 2))


def test_buffers_that_cannot_be_added_to() -> None:
    call = build(Case(SIZE, "float32", ("plain",)))
    call = replace(call, q=call.q.copy())
    out, lse = attention("tiles", call)

    def refused(message: str, error: type[Exception] = ft.ShapeError, **into: Any) -> None:
        with pytest.raises(error, match=message):
            gradients("tiles", call, out, lse, into=ft.Grads(*(into.get(name) for name in NAMES)))

    shape = call.q.shape
    refused("into.dq: expected contiguous", dq=np.zeros((*shape[:3], 2 * shape[3]), np.float32)[..., ::2])
    refused(
        "into.dq: expected elements that do not share",
        dq=np.lib.stride_tricks.as_strided(np.zeros(9999, np.float32), shape, (0, 4, 64, 4)),
    )
    refused("into.dq: expected memory of its own, got that of q", dq=call.q)
    dk = np.zeros(call.k.shape, np.float32)
    same = np.zeros((2, 4, 61, 16), np.float32)
    refused("into.dk: expected memory of its own, got that of into.dq", dq=same[:, :, :37], dk=same[:, :2])
    dk.flags.writeable = False
    refused("into.dk: expected an array that can be written to", ft.UnsupportedError, dk=dk)
    bytes_ = np.zeros(dk.nbytes + 1, np.uint8)[1:]
    refused("into.dk: expected an address", dk=bytes_.view(np.float32).reshape(dk.shape))


def test_add_rounds_once() -> None:
    x = narrow(np.array([1.0, 256.0]), "bfloat16")
    add(x, np.array([2.0**-9, 3.0], np.float32))
    np.testing.assert_array_equal(widen(x), [1.0, 260.0])


@pytest.mark.parametrize("tensors", [False, True], ids=["NumPy", "torch"])
def test_buffers_in_one_array(tensors: bool) -> None:
    """They may be interleaved, as those of a fused projection are, but no element may belong to two."""
    if tensors:
        torch = pytest.importorskip("torch")
    of = torch.from_numpy if tensors else np.asarray
    q, k, v = (of(x) for x in np.random.default_rng(0).standard_normal((3, 2, 4, 9, 8), np.float32))
    out, lse = ft.attention(q, k, v, return_lse=True)
    fused = np.zeros((2, 9, 3, 4, 8), np.float32)
    views = (of(x.swapaxes(1, 2)) for x in fused.transpose(2, 0, 1, 3, 4))
    ft.attention_backward(out, q, k, v, out, lse, into=ft.Grads(*views, None, None))
    wanted = ft.attention_backward(out, q, k, v, out, lse)
    for x, y in zip(fused.transpose(2, 0, 3, 1, 4), wanted[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    row = np.zeros(2 * 4 * 9 * 8 + 8, np.float32)
    dq, dk = (of(row[first : first + 2 * 4 * 9 * 8].reshape(2, 4, 9, 8)) for first in (0, 8))
    with pytest.raises(ft.ShapeError, match=r"into\.dk: expected memory of its own, got that of into\.dq"):
        ft.attention_backward(out, q, k, v, out, lse, into=ft.Grads(dq, dk, None, None, None))
    assert not row.any()
