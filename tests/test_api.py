"""The public functions: layouts, merging, weights, gradients, and what they import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.numerics.dtypes import BFLOAT16, name_of, narrow, widen
from tests.support.grid import OPTIONS, Case, Size, build
from tests.support.runners import Runner, every_array_runner

rng = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return rng.standard_normal(shape)


@every_array_runner
def test_layouts_of_two_three_and_four_axes(runner: Runner) -> None:
    q, k, v, dout = normal(1, 1, 9, 4), normal(1, 1, 11, 4), normal(1, 1, 11, 3), normal(1, 1, 9, 3)
    whole, whole_lse = ft.attention(q, k, v, causal=True, return_lse=True, backend=runner.name.split()[0])
    grads = ft.attention_backward(dout, q, k, v, whole, whole_lse, causal=True, backend=runner.name.split()[0])
    for lead in ((0,), (0, 0)):
        q_, k_, v_, dout_ = (x[lead] for x in (q, k, v, dout))
        out, lse = ft.attention(q_, k_, v_, causal=True, return_lse=True, backend=runner.name.split()[0])
        np.testing.assert_array_equal(out, whole[lead])
        np.testing.assert_array_equal(lse, whole_lse[lead])
        found = ft.attention_backward(dout_, q_, k_, v_, out, lse, causal=True, backend=runner.name.split()[0])
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(found, name), getattr(grads, name)[lead])


def test_options_of_two_and_three_axes() -> None:
    """mask and bias broadcast from the right; a batch of one is still a batch."""
    q, k = normal(4, 9, 4), normal(2, 11, 4)
    mask, bias = rng.random((9, 11)) < 0.7, normal(4, 1, 11)
    options = {"alibi": rng.random(4), "sink": normal(4), "kv_lengths": np.array([8])}
    out = ft.attention(q, k, k, mask=mask, bias=bias, **options)
    whole = ft.attention(q[None], k[None], k[None], mask=mask[None, None], bias=bias[None], **options)
    np.testing.assert_array_equal(out, whole[0])
    out = ft.attention(q[0], k[0], k[0], mask=mask, bias=bias[0], sink=np.zeros(1))
    whole = ft.attention(q[:1], k[:1], k[:1], mask=mask, bias=bias[:1], sink=np.zeros(1))
    np.testing.assert_array_equal(out, whole[0])


def test_return_lse() -> None:
    q = normal(2, 3, 4, 5)
    out = ft.attention(q, q, q)
    assert isinstance(out, np.ndarray) and out.shape == q.shape
    pair = ft.attention(q, q, q, return_lse=True)
    assert isinstance(pair, tuple) and pair[1].shape == (2, 3, 4)
    np.testing.assert_array_equal(pair[0], out)


def test_packed_layouts() -> None:
    q, k, v = normal(9, 4, 5), normal(13, 2, 5), normal(13, 2, 6)
    cu_q, cu_k = np.array([0, 4, 9]), np.array([0, 6, 13])
    out, lse = ft.attention_packed(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    assert out.shape == (9, 4, 6) and lse.shape == (9, 4)
    for s in range(2):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        alone = ft.attention(*(x.swapaxes(0, 1) for x in (q[rows], k[keys], v[keys])), causal=True, return_lse=True)
        np.testing.assert_allclose(out[rows], alone[0].swapaxes(0, 1), atol=1e-14)
        np.testing.assert_allclose(lse[rows], alone[1].T, atol=1e-14)


def test_causal_is_aligned_bottom_right() -> None:
    eye = np.eye(5)
    for n_q in range(1, 6):
        weights = ft.attention(np.zeros((n_q, 4)), np.zeros((5, 4)), eye, causal=True)
        for i in range(n_q):
            seen = 5 - n_q + i + 1
            np.testing.assert_allclose(weights[i], np.r_[np.full(seen, 1 / seen), np.zeros(5 - seen)])


def test_window_is_inclusive_on_both_sides() -> None:
    weights = ft.attention(np.zeros((7, 2)), np.zeros((7, 2)), np.eye(7), window=(2, 1))
    assert [(np.flatnonzero(row).min(), np.flatnonzero(row).max()) for row in weights] == [
        (max(i - 2, 0), min(i + 1, 6)) for i in range(7)
    ]
    np.testing.assert_array_equal(
        ft.attention(np.zeros((7, 2)), np.zeros((7, 2)), np.eye(7), band=ft.Band(2, 1)), weights
    )


def test_mask_together_with_causal() -> None:
    q, mask = normal(6, 4), rng.random((6, 6)) < 0.6
    both = ft.attention(q, q, q, mask=mask, causal=True)
    np.testing.assert_allclose(both, ft.attention(q, q, q, mask=mask & np.tri(6, dtype=bool)), atol=1e-15)


def test_grouped_heads_equal_repeated_key_heads() -> None:
    q, k, v = normal(1, 6, 5, 4), normal(1, 2, 7, 4), normal(1, 2, 7, 4)
    repeated = ft.attention(q, k.repeat(3, axis=1), v.repeat(3, axis=1))
    np.testing.assert_allclose(ft.attention(q, k, v), repeated, atol=1e-15)


def test_a_float32_output_is_not_rounded() -> None:
    q, k, v = (normal(2, 20, 8).astype(np.float16) for _ in range(3))
    wide = ft.attention(q, k, v, out_dtype=np.float32)
    assert wide.dtype == np.float32 and (wide != wide.astype(np.float16)).any()
    np.testing.assert_array_equal(ft.attention(q, k, v), wide.astype(np.float16))


# merge


@every_array_runner
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merge_of_shares_is_the_whole(dtype: Any, runner: Runner) -> None:
    """Shares of the keys, each with a shifted band, merge to the whole in any order."""
    q, k, v = normal(2, 4, 9, 8).astype(dtype), normal(2, 2, 24, 8).astype(dtype), normal(2, 2, 24, 6).astype(dtype)
    band, backend = ft.Band(11, 3, 15), runner.name.split()[0]
    whole, whole_lse = ft.standard_attention(q, k, v, band=band, return_lse=True)
    for order in ((0, 1, 2), (2, 0, 1)):
        out, lse = np.zeros((2, 4, 9, 6), dtype), np.full((2, 4, 9), -np.inf, dtype)
        for share in order:
            keys = slice(8 * share, 8 * share + 8)
            part = ft.attention(
                q, k[:, :, keys], v[:, :, keys], band=band.shifted(-8 * share), return_lse=True, backend=backend
            )
            out, lse = ft.merge(out, lse, *part)
        tolerance = 1e-13 if dtype is np.float64 else 1e-6
        np.testing.assert_allclose(out, whole, atol=tolerance)
        np.testing.assert_allclose(lse, whole_lse, atol=10 * tolerance)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_many_shares_at_once_are_as_near_as_the_whole(kind: str) -> None:
    """One after the other, each merge rounds: a thousand come ten times as far from the truth."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(np.float32) for n in (32, 8000, 8000))
    exact, exact_lse = ft.standard_attention(q, k, v, return_lse=True)
    whole, whole_lse = ft.attention(q, k, v, return_lse=True)
    shares = [ft.attention(q, k[:, :, i : i + 8], v[:, :, i : i + 8], return_lse=True) for i in range(0, 8000, 8)]
    given = [x for share in shares for x in share]
    if kind == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x) for x in given]
    merged, lse = (np.asarray(x) for x in ft.merge(*given))
    assert merged.dtype == lse.dtype == np.float32
    assert np.abs(merged - exact).max() < 1.5 * np.abs(whole - exact).max()
    assert np.abs(lse - exact_lse).max() < 1.5 * np.abs(whole_lse - exact_lse).max()
    with pytest.raises(ft.ShapeError, match=r"^merge: expected an lse for each out"):
        ft.merge(*given[:5])
    with pytest.raises(ft.ShapeError, match=r"^lse_2: expected shape"):
        ft.merge(*given[:5], given[5][..., :3])


def test_merge_with_an_empty_result() -> None:
    q, k = normal(3, 5, 4), normal(3, 6, 4)
    out, lse = ft.attention(q, k, k, return_lse=True)
    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    for a, b in (((out, lse), nothing), (nothing, (out, lse))):
        merged, merged_lse = ft.merge(*a, *b)
        np.testing.assert_array_equal(merged, out)
        np.testing.assert_array_equal(merged_lse, lse)
    merged, merged_lse = ft.merge(*nothing, *nothing)
    assert not merged.any() and np.isneginf(merged_lse).all()


@pytest.mark.parametrize("carrier", [BFLOAT16, "ml_dtypes", np.float16])
def test_merge_of_16_bits(carrier: Any) -> None:
    """merge() accepts the results of attention(), and returns the same dtype."""
    if carrier == "ml_dtypes":
        carrier = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    q, k = (narrow(normal(2, 8, 16), name_of(np.dtype(carrier))).view(carrier) for _ in range(2))
    first, second = (ft.attention(q, x, x, return_lse=True) for x in (k[:, :3], k[:, 3:]))
    out, lse = ft.merge(*first, *second)
    whole, whole_lse = ft.standard_attention(q, k, k, return_lse=True)
    assert out.dtype == np.dtype(carrier) and lse.dtype == np.float32
    np.testing.assert_allclose(widen(out), whole, atol=0.03)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-4)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6, 1e8])
def test_merge_of_two_equal_results(scale: float) -> None:
    """The output stays the same, even if the lse is so large that it has no bits for the sum."""
    q, k, v = (normal(1, 1, n, 16).astype(np.float32) for n in (4, 8, 8))
    out, lse = ft.attention(q, k, v, scale=scale, return_lse=True)
    np.testing.assert_allclose(ft.merge(out, lse, out, lse)[0], out, rtol=1e-6)


def test_merge_keeps_the_dtype_and_does_not_write_to_its_inputs() -> None:
    a, b = normal(5, 4).astype(np.float32), normal(5, 4).astype(np.float32)
    la, lb = normal(5).astype(np.float32) * 1000, normal(5).astype(np.float32) * 1000
    before = [x.copy() for x in (a, la, b, lb)]
    out, lse = ft.merge(a, la, b, lb)
    assert out.dtype == lse.dtype == np.float32 and np.isfinite(out).all()
    for x, y in zip((a, la, b, lb), before, strict=True):
        np.testing.assert_array_equal(x, y)


# probabilities


@pytest.mark.parametrize("option", OPTIONS)
def test_probabilities_sum_to_one_and_match(option: str) -> None:
    size = Size(2, 4, 2, 9, 11, 5, 6)
    call = build(Case(size, "float64", (option,)))
    rows = [0, 4, 8, -1, 4]
    P = ft.probabilities(call.q, call.k, rows=rows, **call.options)
    assert P.shape == (2, 4, 5, 11) and (P >= 0).all()
    np.testing.assert_array_equal(P[:, :, 2], P[:, :, 3])
    out, lse = ft.standard_attention(call.q, call.k, call.v, return_lse=True, **call.options)
    empty = np.isneginf(lse[:, :, rows])
    total = P.sum(axis=-1)
    if "sink" in call.options:
        assert (total < 1 + 1e-12).all()
    else:
        np.testing.assert_allclose(total, np.where(empty, 0, 1), atol=1e-12)
    if "dropout" not in call.options:
        np.testing.assert_allclose(P @ call.v.repeat(2, axis=1), out[:, :, rows], atol=1e-12)


def test_probabilities_of_other_layouts() -> None:
    q, k = normal(9, 4), normal(11, 4)
    P = ft.probabilities(q, k, rows=range(9), causal=True)
    assert P.shape == (9, 11)
    np.testing.assert_allclose(P, ft.attention(q, k, np.eye(11), causal=True), atol=1e-15)
    assert ft.probabilities(q, k, rows=[]).shape == (0, 11)


# standard_attention


def test_standard_attention_is_float64() -> None:
    q = normal(2, 9, 4).astype(np.float16)
    out, lse = ft.standard_attention(q, q, q, return_lse=True)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_array_equal(out, ft.standard_attention(*(x.astype(np.float64) for x in (q, q, q))))


# imports


def test_importing_flashtile_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys, numpy; import flashtile; q = numpy.zeros((4, 8), numpy.float32); flashtile.attention(q, q, q);"
        "print([m for m in ('torch', 'triton', 'ml_dtypes', 'matplotlib', 'typer') if m in sys.modules])"
    )
    assert _python(code) == "[]"


def test_the_import_test_can_fail() -> None:
    pytest.importorskip("torch")
    assert _python("import sys, torch; print('torch' in sys.modules)") == "True"


def test_every_public_name_is_there_and_documented() -> None:
    assert len(set(ft.__all__)) == len(ft.__all__)
    for name in ft.__all__:
        thing = getattr(ft, name)
        assert name == "__version__" or thing.__doc__, name


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@every_array_runner
@pytest.mark.parametrize("integer", [np.uint8, np.uint32, np.int8])
def test_a_band_of_numpy_integers(integer: Any, runner: Runner) -> None:
    """Also unsigned ones, which have no negative values."""
    q, k, v = (normal(1, 1, 200, 8) for _ in range(3))
    want = ft.standard_attention(q, k, v, band=ft.Band(3, 2, 1))
    found = ft.attention(q, k, v, band=ft.Band(integer(3), integer(2), integer(1)), backend=runner.name.split()[0])
    np.testing.assert_allclose(found, want, atol=1e-12)


def test_rows_as_8_bit_integers() -> None:
    q, k = normal(1, 160, 4), normal(1, 5, 4)
    found = ft.probabilities(q, k, rows=np.array([-1], np.int8))
    np.testing.assert_array_equal(found, ft.probabilities(q, k, rows=[159]))


@every_array_runner
def test_gradients_of_no_sequences(runner: Runner) -> None:
    """With a bias that sequences would share."""
    q, starts, bias = np.zeros((0, 2, 8), np.float32), np.array([0]), np.zeros(1, np.float32)
    given = {"bias": bias, "backend": runner.name.split()[0]}
    out, lse = ft.attention_packed(q, q, q, starts, starts, return_lse=True, **given)
    grads = ft.attention_backward(out, q, q, q, out, lse, cu_q=starts, cu_k=starts, **given)
    assert grads.dq.shape == q.shape and not grads.dbias.any()


@pytest.mark.parametrize("backend", ["native", "tiles", "reference"])
def test_numpy_set_to_raise_errors(backend: str) -> None:
    """Weights that underflow are ordinary, and not an error."""
    x = np.array([[3.0, 0.0], [400.0, 1e-30], [-400.0, 1.0]], np.float32)
    half = x.astype(np.float16)
    with np.errstate(all="raise"):
        out, lse = ft.attention(x, x, x, causal=True, return_lse=True, backend=backend)
        ft.attention_backward(x, x, x, x, out, lse, causal=True, backend=backend)
        ft.merge(out, lse, out, lse - 300)
        ft.attention(half, half, half, backend=backend)
        ft.online_softmax(x, 1)
        ft.probabilities(x, x, rows=[0, 2])
