"""Wrong calls raise the right error, which names the argument; right calls are described correctly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.band import FAR, Band
from flashtile.problem import describe
from tests.support.grid import Size

B, H, KV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 8, 6


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def good() -> dict[str, Any]:
    return {"q": zeros(B, H, NQ, D), "k": zeros(B, KV, NK, D), "v": zeros(B, KV, NK, DV)}


def packed() -> dict[str, Any]:
    cu_q, cu_k = np.array([0, 2, 5], np.int32), np.array([0, 3, 7], np.int32)
    return {"q": zeros(5, H, D), "k": zeros(7, KV, D), "v": zeros(7, KV, DV), "cu_q": cu_q, "cu_k": cu_k}


def backward() -> dict[str, Any]:
    return good() | {"dout": zeros(B, H, NQ, DV), "out": zeros(B, H, NQ, DV), "lse": zeros(B, H, NQ)}


def merging() -> dict[str, Any]:
    out, lse = zeros(B, H, NQ, DV), zeros(B, H, NQ)
    return {"out_a": out, "lse_a": lse, "out_b": out.copy(), "lse_b": lse.copy()}


def weights() -> dict[str, Any]:
    return {"q": zeros(B, H, NQ, D), "k": zeros(B, KV, NK, D), "rows": [0]}


def traced() -> dict[str, Any]:
    return {"q": zeros(NQ, D), "k": zeros(NK, D), "v": zeros(NK, DV), "block_q": 2, "block_k": 2}


def call(f: str, given: dict[str, Any]) -> Any:
    return getattr(ft, f)(**given)


def chunked() -> dict[str, Any]:
    return {"x": zeros(3, 4), "chunk": 2}


def planned() -> dict[str, Any]:
    return {"q_shape": (B, H, NQ, D), "k_shape": (B, KV, NK, D)}


BASES: dict[str, Callable[[], dict[str, Any]]] = {
    "attention": good,
    "standard_attention": good,
    "attention_packed": packed,
    "attention_backward": backward,
    "merge": merging,
    "probabilities": weights,
    "trace": traced,
    "online_softmax": chunked,
    "plan": planned,
}
SHAPE, DTYPE, UNSUPPORTED = ft.ShapeError, ft.DTypeError, ft.UnsupportedError
Wrong = tuple[str, dict[str, Any], type[Exception], str]

# function, what is changed in a right call, the error, the argument that it names
WRONG: list[Wrong] = [
    # shapes of q, k and v
    ("attention", {"q": zeros(D)}, SHAPE, "q"),
    ("attention", {"q": zeros(1, B, H, NQ, D)}, SHAPE, "q"),
    ("attention", {"k": zeros(KV, NK, D)}, SHAPE, "k"),
    ("attention", {"v": zeros(KV, NK, D)}, SHAPE, "v"),
    ("attention", {"k": zeros(B + 1, KV, NK, D)}, SHAPE, "k"),
    ("attention", {"v": zeros(1, KV, NK, D)}, SHAPE, "v"),
    ("attention", {"k": zeros(B, KV, NK, D + 1)}, SHAPE, "k"),
    ("attention", {"k": zeros(B, KV, NK + 1, D)}, SHAPE, "v"),
    ("attention", {"v": zeros(B, KV, NK - 1, DV)}, SHAPE, "v"),
    ("attention", {"k": zeros(B, 3, NK, D), "v": zeros(B, 3, NK, D)}, SHAPE, "k"),
    ("attention", {"k": zeros(B, 8, NK, D), "v": zeros(B, 8, NK, D)}, SHAPE, "k"),
    ("attention", {"k": zeros(B, 0, NK, D), "v": zeros(B, 0, NK, D)}, SHAPE, "k"),
    ("attention", {"v": zeros(B, H, NK, DV)}, SHAPE, "v"),
    ("attention", {"q": zeros(B, H, NQ, 0), "k": zeros(B, KV, NK, 0)}, SHAPE, "q"),
    ("attention", {"q": zeros(B, H, NQ, 513), "k": zeros(B, KV, NK, 513)}, SHAPE, "q"),
    ("attention", {"v": zeros(B, KV, NK, 0)}, SHAPE, "v"),
    ("attention", {"v": zeros(B, KV, NK, 513)}, SHAPE, "v"),
    # dtypes and libraries of q, k and v
    ("attention", {"q": [[1.0]]}, DTYPE, "q"),
    ("attention", {"q": None}, DTYPE, "q"),
    ("attention", {"k": [[1.0]]}, DTYPE, "k"),
    ("attention", {"v": 3.0}, DTYPE, "v"),
    ("attention", {"q": zeros(B, H, NQ, D, dtype=np.int32)}, DTYPE, "q"),
    ("attention", {"q": zeros(B, H, NQ, D, dtype=np.complex64)}, DTYPE, "q"),
    ("attention", {"q": zeros(B, H, NQ, D, dtype=bool)}, DTYPE, "q"),
    ("attention", {"q": zeros(B, H, NQ, D, dtype=np.uint16)}, DTYPE, "q"),
    ("attention", {"q": zeros(B, H, NQ, D, dtype=np.float64)}, DTYPE, "k"),
    ("attention", {"k": zeros(B, KV, NK, D, dtype=np.float16)}, DTYPE, "k"),
    ("attention", {"v": zeros(B, KV, NK, DV, dtype=np.float64)}, DTYPE, "v"),
    ("attention", {"q": zeros(B, H, NQ, D, dtype=object)}, DTYPE, "q"),
    # masks and biases
    ("attention", {"mask": zeros(NQ, NK)}, DTYPE, "mask"),
    ("attention", {"mask": zeros(NQ, NK, dtype=np.uint8)}, DTYPE, "mask"),
    ("attention", {"mask": [[True]]}, DTYPE, "mask"),
    ("attention", {"mask": True}, DTYPE, "mask"),
    ("attention", {"mask": zeros(NK, NQ, dtype=bool)}, SHAPE, "mask"),
    ("attention", {"mask": zeros(KV, NQ, NK, dtype=bool)}, SHAPE, "mask"),
    ("attention", {"mask": zeros(1, B, H, NQ, NK, dtype=bool)}, SHAPE, "mask"),
    ("attention", {"mask": zeros(0, dtype=bool)}, SHAPE, "mask"),
    ("attention", {"bias": zeros(NQ, NK, dtype=np.float64)}, DTYPE, "bias"),
    ("attention", {"bias": zeros(NQ, NK, dtype=np.float16)}, DTYPE, "bias"),
    ("attention", {"bias": zeros(NQ, NK, dtype=bool)}, DTYPE, "bias"),
    ("attention", {"bias": 1.0}, DTYPE, "bias"),
    ("attention", {"bias": zeros(NQ + 1, NK)}, SHAPE, "bias"),
    ("attention", {"bias": zeros(B, 3, NQ, NK)}, SHAPE, "bias"),
    # slopes, sinks and lengths
    ("attention", {"alibi": zeros(KV)}, SHAPE, "alibi"),
    ("attention", {"alibi": zeros(H, B)}, SHAPE, "alibi"),
    ("attention", {"alibi": zeros(H, dtype=np.int64)}, DTYPE, "alibi"),
    ("attention", {"alibi": [0.5] * H}, DTYPE, "alibi"),
    ("attention", {"sink": zeros(KV)}, SHAPE, "sink"),
    ("attention", {"sink": zeros(B, H)}, SHAPE, "sink"),
    ("attention", {"sink": zeros(H, dtype=np.float64)}, DTYPE, "sink"),
    ("attention", {"sink": 0.0}, DTYPE, "sink"),
    ("attention", {"kv_lengths": np.array([1, NK + 1])}, SHAPE, "kv_lengths"),
    ("attention", {"kv_lengths": np.array([-1, 2])}, SHAPE, "kv_lengths"),
    ("attention", {"kv_lengths": np.array([1, 2, 3])}, SHAPE, "kv_lengths"),
    ("attention", {"kv_lengths": np.array([[1, 2]])}, SHAPE, "kv_lengths"),
    ("attention", {"kv_lengths": np.array([1.0, 2.0])}, DTYPE, "kv_lengths"),
    ("attention", {"kv_lengths": [1, 2.0]}, DTYPE, "kv_lengths"),
    ("attention", {"kv_lengths": (1, NK + 1)}, SHAPE, "kv_lengths"),
    ("attention", {"kv_lengths": [[1, 2]]}, DTYPE, "kv_lengths"),
    ("attention", {"kv_lengths": "12"}, DTYPE, "kv_lengths"),
    # padding and layouts
    ("attention", {"key_padding_mask": zeros(B, NK)}, DTYPE, "key_padding_mask"),
    ("attention", {"key_padding_mask": zeros(B, NK, dtype=np.int64)}, DTYPE, "key_padding_mask"),
    ("attention", {"key_padding_mask": [[True] * NK] * B}, DTYPE, "key_padding_mask"),
    ("attention", {"key_padding_mask": zeros(NK, dtype=bool)}, SHAPE, "key_padding_mask"),
    ("attention", {"key_padding_mask": zeros(B, NQ, dtype=bool)}, SHAPE, "key_padding_mask"),
    ("attention", {"key_padding_mask": zeros(B, NK, dtype=bool), "mask": zeros(3, NK, dtype=bool)}, SHAPE, "mask"),
    ("attention", {"key_padding_mask": zeros(B, NK, dtype=bool), "mask": zeros(NQ, NK)}, DTYPE, "mask"),
    ("attention", {"key_padding_mask": zeros(B, NK, dtype=bool), "k": zeros(NK)}, SHAPE, "k"),
    ("standard_attention", {"key_padding_mask": zeros(B, NK)}, DTYPE, "key_padding_mask"),
    ("attention_packed", {"key_padding_mask": zeros(2, 4, dtype=bool)}, DTYPE, "key_padding_mask"),
    ("attention_packed", {"layout": "bhnd"}, DTYPE, "layout"),
    ("attention", {"layout": "nbhd"}, SHAPE, "layout"),
    ("attention", {"layout": 4}, SHAPE, "layout"),
    ("attention", {"layout": "bnhd"}, SHAPE, "k"),
    ("attention", {"q": memoryview(zeros(B, H, NQ, D))}, DTYPE, "q"),
    ("attention", {"v": memoryview(zeros(B, KV, NK, DV))}, DTYPE, "v"),
    ("attention", {"q": np.float32}, DTYPE, "q"),
    ("attention", {"k": np.dtype("float32")}, DTYPE, "k"),
    # numbers
    ("attention", {"scale": np.nan}, SHAPE, "scale"),
    ("attention", {"scale": np.inf}, SHAPE, "scale"),
    ("attention", {"scale": "1"}, DTYPE, "scale"),
    ("attention", {"scale": True}, DTYPE, "scale"),
    ("attention", {"scale": 1j}, DTYPE, "scale"),
    ("attention", {"scale": 1e39}, SHAPE, "scale"),
    ("attention", {"softcap": 1e39}, SHAPE, "softcap"),
    ("attention", {"softcap": 1e-40}, SHAPE, "softcap"),
    ("attention", {"softcap": -1.0}, SHAPE, "softcap"),
    ("attention", {"softcap": np.nan}, SHAPE, "softcap"),
    ("attention", {"softcap": None}, DTYPE, "softcap"),
    ("attention", {"dropout": 1.0}, SHAPE, "dropout"),
    ("attention", {"dropout": -0.1}, SHAPE, "dropout"),
    ("attention", {"dropout": np.nan}, SHAPE, "dropout"),
    ("attention", {"dropout": True}, DTYPE, "dropout"),
    ("attention", {"seed": -1}, SHAPE, "seed"),
    ("attention", {"seed": 2**64}, SHAPE, "seed"),
    ("attention", {"seed": 1.5}, DTYPE, "seed"),
    ("attention", {"seed": np.array(1.5)}, DTYPE, "seed"),
    ("attention", {"window": (np.array(3.7), 0)}, DTYPE, "window"),
    ("attention", {"threads": np.array([1, 2])}, DTYPE, "threads"),
    ("attention", {"seed": None}, DTYPE, "seed"),
    ("attention", {"threads": 0}, SHAPE, "threads"),
    ("attention", {"threads": -2}, SHAPE, "threads"),
    ("attention", {"threads": 1.0}, DTYPE, "threads"),
    # windows and bands
    ("attention", {"window": (-1, 0)}, SHAPE, "window"),
    ("attention", {"window": (0, -1)}, SHAPE, "window"),
    ("attention", {"window": (1,)}, SHAPE, "window"),
    ("attention", {"window": (1, 2, 3)}, SHAPE, "window"),
    ("attention", {"window": 4}, SHAPE, "window"),
    ("attention", {"window": "12"}, SHAPE, "window"),
    ("attention", {"window": b"ab"}, SHAPE, "window"),
    ("attention", {"window": bytearray(b"ab")}, SHAPE, "window"),
    ("attention", {"window": (1.0, 2)}, DTYPE, "window"),
    ("attention", {"window": (True, 2)}, DTYPE, "window"),
    ("attention", {"band": (1, 2)}, DTYPE, "band"),
    ("attention", {"band": ft.causal(), "causal": True}, SHAPE, "band"),
    ("attention", {"band": ft.full(), "window": (1, 1)}, SHAPE, "band"),
    ("attention", {"band": Band(1.5, 2)}, DTYPE, "band"),
    ("attention", {"band": Band(offset=2**60)}, SHAPE, "band"),
    # flags, dtypes of results, backends
    ("attention", {"causal": 1}, DTYPE, "causal"),
    ("attention", {"causal": None}, DTYPE, "causal"),
    ("attention", {"causal": "yes"}, DTYPE, "causal"),
    ("attention", {"return_lse": 0}, DTYPE, "return_lse"),
    ("attention", {"deterministic": "no"}, DTYPE, "deterministic"),
    ("attention", {"out_dtype": np.float64}, DTYPE, "out_dtype"),
    ("attention", {"out_dtype": np.float16}, DTYPE, "out_dtype"),
    ("attention", {"out_dtype": "int8"}, DTYPE, "out_dtype"),
    ("attention", {"backend": "magic"}, UNSUPPORTED, "backend"),
    ("attention", {"backend": None}, UNSUPPORTED, "backend"),
    ("attention", {"backend": np.array([1, 2])}, UNSUPPORTED, "backend"),
    ("plan", {"backend": np.array([1, 2])}, UNSUPPORTED, "backend"),
    ("trace", {"order": np.array([1, 2])}, SHAPE, "order"),
    # packed sequences
    ("attention_packed", {"q": zeros(B, H, NQ, D)}, SHAPE, "q"),
    ("attention_packed", {"q": zeros(5, D)}, SHAPE, "q"),
    ("attention_packed", {"v": zeros(7, D)}, SHAPE, "v"),
    ("attention_packed", {"cu_q": np.array([0, 3, 2, 5])}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_q": np.array([0, 2**63 - 1, -2, 5])}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_k": np.array([0, 2**31 - 1, -2, 7], np.int32)}, SHAPE, "cu_k"),
    ("attention_packed", {"cu_q": np.array([1, 2, 5])}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_q": np.array([0])}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_q": np.array([0, 2, 4])}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_k": np.array([0, 2, 8])}, SHAPE, "cu_k"),
    ("attention_packed", {"cu_k": np.array([0, 1, 2, 7])}, SHAPE, "cu_k"),
    ("attention_packed", {"cu_k": np.array([[0, 2, 7]])}, SHAPE, "cu_k"),
    ("attention_packed", {"cu_q": np.array([], np.int64)}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_q": np.array([0.0, 2, 5])}, DTYPE, "cu_q"),
    ("attention_packed", {"cu_q": np.array([0, 2, 5], np.int8)}, DTYPE, "cu_q"),
    ("attention_packed", {"cu_q": [0, 2, 4]}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_k": [0, -2, 7]}, SHAPE, "cu_k"),
    ("attention_packed", {"cu_k": (0, 2.0, 7)}, DTYPE, "cu_k"),
    ("attention_packed", {"cu_q": []}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_q": None}, SHAPE, "cu_q"),
    ("attention_packed", {"cu_k": None}, SHAPE, "cu_k"),
    ("attention_packed", {"kv_lengths": np.array([3, 5])}, SHAPE, "kv_lengths"),
    ("attention_packed", {"mask": zeros(5, 7, dtype=bool)}, SHAPE, "mask"),
    ("attention_packed", {"alibi": zeros(3, H)}, SHAPE, "alibi"),
    # gradients
    ("attention_backward", {"dout": zeros(B, H, NQ, D)}, SHAPE, "dout"),
    ("attention_backward", {"dout": zeros(B, H, NQ, DV, dtype=np.float64)}, DTYPE, "dout"),
    ("attention_backward", {"dout": None}, DTYPE, "dout"),
    ("attention_backward", {"out": zeros(B, H, NQ + 1, DV)}, SHAPE, "out"),
    ("attention_backward", {"out": None}, DTYPE, "out"),
    ("attention_backward", {"lse": zeros(B, H, NQ, 1)}, SHAPE, "lse"),
    ("attention_backward", {"lse": zeros(B, H, NQ, dtype=np.float64)}, DTYPE, "lse"),
    ("attention_backward", {"lse": None}, DTYPE, "lse"),
    ("attention_backward", {"dlse": zeros(B, H)}, SHAPE, "dlse"),
    ("attention_backward", {"dlse": zeros(B, H, NQ, dtype=np.float16)}, DTYPE, "dlse"),
    ("attention_backward", {"backend": "magic"}, UNSUPPORTED, "backend"),
    ("attention_backward", {"dropout": 2.0}, SHAPE, "dropout"),
    ("attention_backward", {"out_dtype": np.float16}, DTYPE, "out_dtype"),
    ("attention_backward", {"grad_dtype": np.float16}, DTYPE, "grad_dtype"),
    ("attention_backward", {"grad_dtype": "flot"}, DTYPE, "grad_dtype"),
    ("attention_backward", {"grad_dtype": [1]}, DTYPE, "grad_dtype"),
    ("attention_backward", {"into": zeros(B, H, NQ, D)}, DTYPE, "into"),
    ("attention_backward", {"into": ft.Grads(None, [1.0], None, None, None)}, DTYPE, "into.dk"),
    ("attention_backward", {"into": ft.Grads(zeros(B, H, NQ, D + 1), None, None, None, None)}, SHAPE, "into.dq"),
    (
        "attention_backward",
        {"into": ft.Grads(None, None, zeros(B, KV, NK, DV, dtype=float), None, None)},
        DTYPE,
        "into.dv",
    ),
    ("attention_backward", {"into": ft.Grads(None, None, None, None, zeros(H))}, DTYPE, "into.dsink"),
    # merging
    ("merge", {"lse_a": zeros(B, H)}, SHAPE, "lse_a"),
    ("merge", {"out_b": zeros(B, H, NQ, D)}, SHAPE, "out_b"),
    ("merge", {"lse_b": zeros(B, H, NQ, 1)}, SHAPE, "lse_b"),
    ("merge", dict.fromkeys(("out_a", "lse_a", "out_b", "lse_b"), zeros()), SHAPE, "out_a"),
    ("merge", {"out_b": None}, DTYPE, "out_b"),
    ("merge", {"out_a": zeros(B, H, NQ, DV, dtype=int)}, DTYPE, "out_a"),
    ("merge", {"lse_b": [1.0]}, DTYPE, "lse_b"),
    ("merge", {"out_a": [1.0]}, DTYPE, "out_a"),
    # rows and tiles
    ("probabilities", {"rows": [NQ]}, SHAPE, "rows"),
    ("probabilities", {"rows": [-NQ - 1]}, SHAPE, "rows"),
    ("probabilities", {"rows": [0.5]}, DTYPE, "rows"),
    ("probabilities", {"rows": [[0]]}, DTYPE, "rows"),
    ("probabilities", {"rows": None}, DTYPE, "rows"),
    ("standard_attention", {"k": [1.0]}, DTYPE, "k"),
    ("standard_attention", {"return_lse": 1}, DTYPE, "return_lse"),
    ("trace", {"order": "fa3"}, SHAPE, "order"),
    ("trace", {"q": zeros(1, NQ, D)}, SHAPE, "q"),
    ("trace", {"k": [1.0]}, DTYPE, "k"),
    ("trace", {"block_q": 0}, SHAPE, "block_q"),
    ("trace", {"block_k": 1.5}, DTYPE, "block_k"),
    ("trace", {"order": "backward"}, DTYPE, "dout"),
    ("trace", {"order": "backward", "dout": zeros(NQ, D)}, SHAPE, "dout"),
    ("online_softmax", {"x": [1.0]}, DTYPE, "x"),
    ("online_softmax", {"x": zeros(3, 4, dtype=int)}, DTYPE, "x"),
    ("online_softmax", {"x": zeros()}, SHAPE, "x"),
    ("online_softmax", {"chunk": 0}, SHAPE, "chunk"),
    ("online_softmax", {"chunk": -1}, SHAPE, "chunk"),
    ("online_softmax", {"chunk": 2.5}, DTYPE, "chunk"),
    ("plan", {"q_shape": (B, -H, NQ, D)}, SHAPE, "q_shape"),
    ("plan", {"k_shape": (B, KV, 2.5, D)}, DTYPE, "k_shape"),
    ("plan", {"v_shape": 3}, DTYPE, "v_shape"),
    ("plan", {"q_shape": b"ab"}, DTYPE, "q_shape"),
    ("plan", {"q_shape": (1,) * 5}, SHAPE, "q_shape"),
    ("plan", {"dtype": "flot"}, DTYPE, "dtype"),
    ("plan", {"dtype": "f4"}, DTYPE, "dtype"),
    ("plan", {"dtype": [1]}, DTYPE, "dtype"),
    ("plan", {"dtype": None}, DTYPE, "dtype"),
    ("plan", {"dtype": np.dtype("int32")}, DTYPE, "dtype"),
    ("plan", {"dtype": np.dtype(">f4")}, DTYPE, "dtype"),
    ("plan", {"mask": (-NQ, NK)}, SHAPE, "mask"),
    ("plan", {"mask": [[True]]}, DTYPE, "mask"),
    ("plan", {"bias": ("a", NK)}, DTYPE, "bias"),
    ("plan", {"sink": (2.5,)}, DTYPE, "sink"),
    ("plan", {"hardware": "h200"}, DTYPE, "hardware"),
    ("plan", {"kv_lengths": np.array([1, NK + 1])}, SHAPE, "kv_lengths"),
    ("attention", {"q": np.ma.masked_array(zeros(B, H, NQ, D), mask=True)}, DTYPE, "q"),
    ("attention", {"k": None}, DTYPE, "k"),
    ("attention", {"v": None}, DTYPE, "v"),
    ("standard_attention", {"mask": [[True]]}, DTYPE, "mask"),
    ("trace", {"bias": [[1.0]]}, DTYPE, "bias"),
    ("probabilities", {"cu_q": np.array([0, B])}, SHAPE, "cu_q"),
    # non-native byte order
    ("attention", {name: good()[name].astype(">f4") for name in "qkv"}, DTYPE, "q"),
    ("attention", {"bias": zeros(NQ, NK, dtype=">f4")}, DTYPE, "bias"),
    ("merge", {"lse_b": zeros(B, H, NQ, dtype=">f4")}, DTYPE, "lse_b"),
]


def name_of(wrong: Wrong) -> str:
    function, change, _, argument = wrong
    values = [f"{n} {getattr(x, 'dtype', '')}{x.shape if hasattr(x, 'shape') else x}" for n, x in change.items()]
    return f"{function}({', '.join(values)})-{argument}"


@pytest.mark.parametrize("wrong", WRONG, ids=name_of)
def test_wrong_call(wrong: Wrong) -> None:
    function, change, error, argument = wrong
    given = BASES[function]() | change
    before = {name: x.copy() for name, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error) as caught:
        call(function, given)
    assert isinstance(caught.value, ft.FlashtileError)
    text = str(caught.value)
    assert text.startswith((f"{argument}:", f"{argument}.")), text
    assert "got" in text or "expected" in text, "it should say what was expected and what it got"
    for name, x in before.items():
        np.testing.assert_array_equal(given[name], x, name)


@pytest.mark.parametrize("function", BASES)
def test_the_right_calls_are_right(function: str) -> None:
    """So each wrong call is wrong only because of what was changed in it."""
    call(function, BASES[function]())


def test_the_error_for_swapped_heads_and_lengths_names_the_axes() -> None:
    with pytest.raises(ft.ShapeError, match=r"got 120; in attention\(\) axes are \(batch, heads, length, dim\)"):
        ft.attention(zeros(1, 100, 8, 64), *[zeros(1, 120, 8, 64)] * 2)
    given = packed()
    with pytest.raises(ft.ShapeError, match=r"axes are \(total, heads, dim\)"):
        ft.attention_packed(**given | {name: np.repeat(given[name], 3, axis=1) for name in ("k", "v")})


def test_there_are_enough_wrong_calls() -> None:
    assert len(WRONG) >= 60


def test_errors_derive_from_python_errors() -> None:
    assert issubclass(ft.ShapeError, ValueError)
    assert issubclass(ft.DTypeError, TypeError)
    assert issubclass(ft.UnsupportedError, NotImplementedError)


def test_factors_that_only_float64_can_represent() -> None:
    x = np.ones((3, 8))
    for options in ({"scale": 1e39}, {"softcap": 1e39}, {"softcap": 1e-40}):
        assert np.isfinite(ft.attention(x, x, x, **options)).all()


def test_unknown_options() -> None:
    for function, base in BASES.items():
        with pytest.raises(TypeError, match="casual"):
            call(function, base() | {"casual": True})


def test_the_error_for_a_wrong_mask_names_the_right_option() -> None:
    with pytest.raises(ft.DTypeError, match=r"^mask: .* got float32; numbers to be added to the scores are a bias"):
        ft.attention(**good(), mask=zeros(NQ, NK))
    with pytest.raises(ft.ShapeError, match=r"^mask: .* got \(2, 7\); a mask of \(batch, keys\) is key_padding_mask"):
        ft.attention(**good(), mask=zeros(B, NK, dtype=bool))


@pytest.mark.parametrize("n_k", [NQ, NK])
def test_a_mask_whose_rows_may_be_queries_or_sequences(n_k: int) -> None:
    q, k, mask = zeros(NQ, H, NQ, D), zeros(NQ, KV, n_k, D), zeros(NQ, n_k, dtype=bool)
    with pytest.raises(
        ft.ShapeError, match=r"^mask: expected four axes.*\(queries, keys\) or \(batch, keys\), got two"
    ):
        ft.attention(q, k, k, mask=mask)
    ft.attention(q, k, k, mask=mask[None, None])
    ft.attention(q, k, k, key_padding_mask=mask)
    ft.attention(q[:3], k[:3], k[:3], mask=mask)
    ft.attention(q[:1, :, :1], k[:1], k[:1], mask=mask[:1])  # means the same either way


def test_the_error_of_an_explicit_backend_names_those_that_could(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile.backends import tiles

    monkeypatch.setattr(tiles, "missing", lambda: "not here", raising=False)
    with pytest.raises(ft.UnsupportedError, match=r"^backend: tiles.*not here.*could: .*reference"):
        ft.attention(**good(), backend="tiles")
    ft.attention(**good())  # auto chooses another backend


def test_fields_of_a_problem() -> None:
    p = describe(**good(), causal=True, window=(3, 5))
    assert (p.sequences, p.heads, p.kv_heads, p.n_q, p.n_k, p.dim, p.dim_v) == (B, H, KV, NQ, NK, D, DV)
    assert p.group == 2 and not p.packed and p.accumulator == "float32" and p.out_dtype == "float32"
    assert p.scale == D**-0.5
    assert p.band_for(NQ, NK) == Band(3, 0, NK - NQ)
    assert p.q_lengths == [NQ] * B and p.k_lengths == [NK] * B
    with pytest.raises(FrozenInstanceError):
        p.scale = 1.0  # type: ignore[misc]
    p = describe(**packed(), kv_lengths=np.array([1, 4]))
    assert p.packed and p.q_lengths == [2, 3] and p.k_lengths == [1, 4] and (p.n_q, p.n_k) == (3, 4)
    assert p.band_for(3, 4) == Band(FAR, FAR, 1)
    assert describe(**good(), band=Band(1, 2, 3)).band_for(9, 99) == Band(1, 2, 3)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_out_dtype(dtype: str) -> None:
    given = {name: x.astype(dtype) for name, x in good().items()}
    wide = "float64" if dtype == "float64" else "float32"
    for asked in (None, dtype, wide, np.dtype(wide), np.dtype(wide).type):
        out, lse = ft.attention(**given, out_dtype=asked, return_lse=True)
        assert out.dtype == np.dtype(asked or dtype) and lse.dtype == wide


def test_describe_copies_nothing() -> None:
    """Whatever the strides."""
    size = Size(2, 4, 2, 5, 7, 8, 6)
    q = zeros(size.batch, size.n_q, size.heads, size.dim).swapaxes(1, 2)[:, ::-1]
    k, v = good()["k"], good()["v"]
    mask = np.ones((NQ, NK), bool)
    p = describe(q, k, v, mask=mask)
    assert all(np.shares_memory(a, b) for a, b in ((p.q, q), (p.k, k), (p.v, v), (p.mask, mask)))
    assert p.q.shape == q.shape and p.mask.shape == (1, 1, NQ, NK)
