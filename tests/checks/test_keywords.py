"""A keyword that a function does not have names the one it has."""

from __future__ import annotations

import pytest

import flashtile as ft
from tests.test_problem import BASES, call

WITH_OPTIONS = [name for name in BASES if name not in ("merge", "online_softmax")]


@pytest.mark.parametrize("function", WITH_OPTIONS)
def test_a_misspelt_keyword(function: str) -> None:
    for wrong, near in (("casual", "causal"), ("dropuot", "dropout"), ("kv_length", "kv_lengths")):
        with pytest.raises(ft.DTypeError, match=rf"^{wrong}: expected {near}; got a keyword that {function}\(\)"):
            call(function, BASES[function]() | {wrong: 1})
    with pytest.raises(ft.DTypeError, match=r"^xyzzy: expected one of .*causal.*; got a keyword"):
        call(function, BASES[function]() | {"xyzzy": 1})


@pytest.mark.parametrize("function", WITH_OPTIONS)
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("is_causal", "causal"),
        ("attn_mask", "mask .* or bias"),
        ("dropout_p", "dropout, with a seed"),
        ("enable_gqa", "no keyword"),
        ("softmax_scale", "scale"),
        ("window_size", "window"),
        ("alibi_slopes", "alibi"),
        ("score_mod", "bias, alibi or softcap"),
    ],
)
def test_a_keyword_of_another_library(function: str, wrong: str, right: str) -> None:
    with pytest.raises(ft.DTypeError, match=f"^{wrong}: expected {right}.*; got a keyword"):
        call(function, BASES[function]() | {wrong: None})
