"""Arguments that are wrong by themselves, whatever the others are: kinds of arrays and of numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import flashtile as ft
from flashtile.problem import describe
from tests.test_problem import BASES, DV, NK, NQ, B, D, H, call, good, zeros


@pytest.mark.parametrize(
    ("function", "argument"),
    [(function, name) for function, base in BASES.items() for name, x in base().items() if isinstance(x, np.ndarray)]
    + [
        ("attention_packed", "kv_lengths"),
        ("standard_attention", "cu_q"),
        ("trace", "dout"),
        ("probabilities", "rows"),
        *(("attention", name) for name in ("mask", "bias", "alibi", "sink", "kv_lengths")),
    ],
)
def test_masked_arrays_and_matrices_are_refused(function: str, argument: str) -> None:
    given = BASES[function]()
    masked = np.ma.masked_array(given.get(argument, zeros(1)), mask=True)
    with pytest.raises(ft.DTypeError, match=f"^{argument}: .* a masked one"):
        call(function, given | {argument: masked})
    with pytest.raises(ft.DTypeError, match=f"^{argument}: .* a matrix"):
        call(function, given | {argument: zeros(NQ, D).view(np.matrix)})


TORCH = [
    ("attention", "q", "k"),
    ("attention", "k", "k"),
    ("attention", "v", "v"),
    ("attention", "mask", "mask"),
    ("attention", "bias", "bias"),
    ("attention", "alibi", "alibi"),
    ("attention", "sink", "sink"),
    ("attention", "kv_lengths", "kv_lengths"),
    ("attention_packed", "cu_q", "cu_q"),
    ("attention_packed", "cu_k", "cu_k"),
    ("attention_backward", "dout", "dout"),
    ("attention_backward", "lse", "lse"),
    ("merge", "lse_a", "lse_a"),
    ("merge", "out_b", "out_b"),
    ("standard_attention", "k", "k"),
    ("probabilities", "k", "k"),
    ("trace", "v", "v"),
]


@pytest.mark.parametrize(("function", "changed", "argument"), TORCH)
def test_numpy_and_torch_do_not_mix(function: str, changed: str, argument: str) -> None:
    torch = pytest.importorskip("torch")
    options = {
        "mask": zeros(NQ, NK, dtype=bool),
        "bias": zeros(NQ, NK),
        "alibi": zeros(H),
        "sink": zeros(H),
        "kv_lengths": np.array([1, 2]),
    }
    given = BASES[function]() | ({changed: options[changed]} if changed in options else {})
    given[changed] = torch.from_numpy(given[changed])
    with pytest.raises(ft.DTypeError, match=f"^{argument}:"):
        call(function, given)


@pytest.mark.parametrize("function", ["standard_attention", "probabilities", "trace"])
def test_numpy_only(function: str) -> None:
    torch = pytest.importorskip("torch")
    given = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in BASES[function]().items()}
    with pytest.raises(ft.DTypeError, match=r"^q:"):
        call(function, given)


def test_numpy_scalars_are_numbers() -> None:
    out = ft.attention(
        **good(),
        causal=np.bool_(True),
        window=[np.int64(3), None],
        scale=np.float32(0.5),
        softcap=2,
        dropout=np.float64(0.25),
        seed=np.uint64(2**64 - 1),
        threads=np.int32(1),
        kv_lengths=np.array([3, 7], np.int32),
    )
    assert out.shape == (B, H, NQ, DV)


@pytest.mark.parametrize("argument", ["scale", "softcap", "dropout"])
def test_numbers_too_large_for_a_float(argument: str) -> None:
    for number in (10**400, -(10**400), Fraction(10**400)):
        with pytest.raises(ft.ShapeError, match=f"^{argument}: expected a finite number"):
            call("attention", good() | {argument: number})
    x = np.zeros((3, 8))
    assert describe(x, x, x, scale=10**308).scale == 1e308


def test_integers_with_more_digits_than_python_prints() -> None:
    with pytest.raises(ft.ShapeError, match=r"^seed: .* of very many digits"):
        ft.attention(**good(), seed=10**5000)
