"""layout= and key_padding_mask= equal axes swapped and a mask made by hand; warnings for doubtful shapes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import flashtile as ft

rng = np.random.default_rng(0)
B, H, KV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 8, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"mask": rng.random((B, 1, NQ, NK)) < 0.7},
    "mask of two axes": {"mask": rng.random((NQ, NK)) < 0.7},
    "bias": {"bias": rng.standard_normal((H, NQ, NK))},
    "lengths": {"kv_lengths": np.array([3, 7])},
    "alibi": {"alibi": rng.random((B, H)), "window": (3, None)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def arrays() -> list[Any]:
    """Return q, k and v as (batch, heads, length, dim)."""
    return [rng.standard_normal(s) for s in ((B, H, NQ, D), (B, KV, NK, D), (B, KV, NK, DV))]


def swapped(*given: Any) -> list[Any]:
    return [np.ascontiguousarray(x.swapaxes(1, 2)) for x in given]


@every_option
def test_layout_bnhd(options: dict[str, Any]) -> None:
    q, k, v = arrays()
    dout = rng.standard_normal((B, H, NQ, DV))
    out, lse = ft.attention(q, k, v, return_lse=True, **options)
    given = swapped(q, k, v)
    found, found_lse = ft.attention(*given, return_lse=True, layout="bnhd", **options)
    assert found.shape == (B, NQ, H, DV) and found.flags.c_contiguous and found_lse.shape == (B, NQ, H)
    np.testing.assert_array_equal(found.swapaxes(1, 2), out)
    np.testing.assert_array_equal(found_lse.swapaxes(1, 2), lse)
    np.testing.assert_array_equal(ft.attention(*given, layout="bnhd", **options), found)
    np.testing.assert_allclose(ft.standard_attention(*given, layout="bnhd", **options), found, atol=1e-12)
    wanted = ft.attention_backward(dout, q, k, v, out, lse, **options)
    (rows_dout,) = swapped(dout)
    grads = ft.attention_backward(rows_dout, *given, found, found_lse, layout="bnhd", **options)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(grads, name).swapaxes(1, 2), getattr(wanted, name))
    if "bias" in options:
        np.testing.assert_array_equal(grads.dbias, wanted.dbias)


def test_merge_of_results_in_the_layout_bnhd() -> None:
    q, k, v = swapped(*arrays())
    parts = [ft.attention(q, k[:, s], v[:, s], return_lse=True, layout="bnhd") for s in (slice(3), slice(3, None))]
    merged, _ = ft.merge(*parts[0], *parts[1])
    np.testing.assert_allclose(merged, ft.attention(q, k, v, layout="bnhd"), atol=1e-12)


def test_layouts_of_fewer_axes() -> None:
    q, k, v = (x[0] for x in arrays())
    out, lse = ft.attention(q, k, v, return_lse=True)
    found, found_lse = ft.attention(*(x.swapaxes(0, 1) for x in (q, k, v)), return_lse=True, layout="bnhd")
    np.testing.assert_array_equal(found.swapaxes(0, 1), out)
    np.testing.assert_array_equal(found_lse.T, lse)
    out, lse = ft.attention(q[0], k[0], v[0], return_lse=True)
    found, found_lse = ft.attention(q[0], k[0], v[0], return_lse=True, layout="bnhd")
    np.testing.assert_array_equal(found, out)
    np.testing.assert_array_equal(found_lse, lse)


def padding(batch: int = B) -> Any:
    """Hide the last keys of the first sequence, and the first keys of the others."""
    seen = np.ones((batch, NK), bool)
    seen[0, 4:] = False
    seen[1:, :2] = False
    return seen


@every_option
@pytest.mark.parametrize("layout", [None, "bhnd", "bnhd"])
def test_padding_is_a_mask_for_all_queries(layout: str | None, options: dict[str, Any]) -> None:
    q, k, v = arrays()
    whole = padding()[:, None, None] & options.get("mask", np.array(True))
    want = ft.attention(q, k, v, **{**options, "mask": whole})
    given = swapped(q, k, v) if layout == "bnhd" else [q, k, v]
    options = {**options, "layout": layout, "key_padding_mask": padding()}
    out, found = ft.attention(*given, return_lse=True, **options)
    if layout == "bnhd":
        np.testing.assert_array_equal(out.swapaxes(1, 2), want)
    else:
        np.testing.assert_array_equal(out, want)
    np.testing.assert_allclose(ft.standard_attention(*given, **options), out, atol=1e-12)
    grads = ft.attention_backward(out, *given, out, found, **options)
    dk = grads.dk if layout == "bnhd" else grads.dk.swapaxes(1, 2)
    assert not dk[~padding()].any() and dk[padding()].any()
    P = ft.probabilities(given[0], given[1], rows=[0, 1], **options)
    assert not P[:, :, :, :][np.broadcast_to(~padding()[:, None, None], P.shape)].any()


def test_padding_of_fewer_axes() -> None:
    """A batch of one is still a batch."""
    q, k, v = (x[0] for x in arrays())
    seen = padding()[:1]
    want = ft.attention(q, k[:, :4], v[:, :4])
    np.testing.assert_allclose(ft.attention(q, k, v, key_padding_mask=seen), want, atol=1e-14)
    np.testing.assert_allclose(ft.attention(q[0], k[0], v[0], key_padding_mask=seen), want[0], atol=1e-14)


def test_packed_sequences_accept_neither() -> None:
    q, starts = rng.standard_normal((5, 2, 4)), np.array([0, 2, 5])
    for more in ({"layout": "bnhd"}, {"layout": "bhnd"}, {"key_padding_mask": np.ones((2, 3), bool)}):
        with pytest.raises(ft.ShapeError, match=f"^{next(iter(more))}: expected None, because sequences are packed"):
            ft.standard_attention(q, q, q, cu_q=starts, cu_k=starts, **more)
        with pytest.raises(ft.DTypeError, match=f"^{next(iter(more))}: expected "):
            ft.attention_packed(q, q, q, starts, starts, **more)


def test_lists_of_lengths() -> None:
    q, k, v = arrays()
    want = ft.attention(q, k, v, kv_lengths=np.array([3, 7]))
    for lengths in ([3, 7], (3, 7), [np.int32(3), 7]):
        np.testing.assert_array_equal(ft.attention(q, k, v, kv_lengths=lengths), want)
    np.testing.assert_allclose(ft.standard_attention(q, k, v, kv_lengths=[3, 7]), want, atol=1e-12)
    assert ft.plan(q.shape, k.shape, kv_lengths=[3, 7]) == ft.plan(q.shape, k.shape, kv_lengths=np.array([3, 7]))
    x = rng.standard_normal((9, 2, 4))
    starts = np.array([0, 4, 9])
    want, lse = ft.attention_packed(x, x, x, starts, starts, return_lse=True)
    np.testing.assert_array_equal(ft.attention_packed(x, x, x, [0, 4, 9], (0, 4, 9)), want)
    grads = ft.attention_backward(want, x, x, x, want, lse, cu_q=[0, 4, 9], cu_k=[0, 4, 9])
    np.testing.assert_array_equal(
        grads.dq, ft.attention_backward(want, x, x, x, want, lse, cu_q=starts, cu_k=starts).dq
    )


# Shapes that suggest the other layout: (q, k, causal)

DOUBTFUL = [
    ((1, 64, 32, 16), (1, 64, 8, 16), True),  # 64 tokens, 32 heads on 8: 24 of 32 rows would see no key
    ((2, 40, 8, 16), (2, 40, 1, 16), True),
    ((1, 2048, 32, 4), (1, 2048, 32, 4), True),
    ((1, 2048, 32, 4), (1, 2048, 32, 4), False),
    ((1, 300, 8, 4), (1, 300, 2, 4), False),
]
PLAIN = [
    ((2, 32, 1, 16), (2, 8, 500, 16), True),  # decodes
    ((2, 32, 1, 16), (2, 32, 1, 16), True),
    ((2, 128, 1, 16), (2, 1, 9, 16), False),
    ((1, 128, 4, 16), (1, 128, 4, 16), True),  # a short prompt with many heads
    ((1, 64, 16, 16), (1, 64, 16, 16), False),
    ((1, 32, 9, 16), (1, 8, 3, 16), True),  # more queries than keys
    ((1, 4, 9, 16), (1, 4, 3, 16), True),
    ((1, 16, 8, 16), (1, 16, 5, 16), True),
    ((600, 8, 16), (600, 8, 16), False),  # batch and heads in one
]


def warnings_of(q: Any, k: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ft.attention(q, k, k, **options)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shapes_that_suggest_the_other_layout(library: str) -> None:
    torch = pytest.importorskip("torch") if library == "torch" else None
    zeros = np.zeros if torch is None else torch.zeros
    for q_shape, k_shape, causal in DOUBTFUL:
        q, k = zeros(q_shape), zeros(k_shape)
        (warning,) = warnings_of(q, k, causal=causal)
        assert warning.startswith("q: expected (batch, heads, length, dim)") and 'layout="bnhd"' in warning
        for layout in ("bhnd", "bnhd"):
            assert not warnings_of(q, k, causal=causal, layout=layout)
    for q_shape, k_shape, causal in PLAIN:
        assert not warnings_of(zeros(q_shape), zeros(k_shape), causal=causal), (q_shape, k_shape)
