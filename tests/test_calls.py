"""The cache of NumPy calls: the second call of a kind skips the description, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile import calls as cache
from flashtile.backends import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no C++ core")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KNOWN", {})


def arrays(seed: int = 0, dtype: Any = np.float32, shape: tuple[int, ...] = (2, 4, 20, 16)) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, None)},
    "band": {"band": ft.Band(3, 2, 1)},
    "scores": {"softcap": 2.0, "scale": np.float64(0.3)},
    "dropout": {"dropout": 0.5, "seed": 7},
    "explicit": {"backend": "native", "threads": np.int64(1), "deterministic": True},
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_cached_calls_have_the_same_bits(name: str, dtype: Any) -> None:
    options = OPTIONS[name]
    for shape in ((2, 4, 20, 16), (4, 20, 16), (20, 16)):
        given = arrays(1, dtype, shape)
        ft.attention(*arrays(0, dtype, shape), **options)
        assert len(cache.KNOWN) == 1
        found = ft.attention(*given, **options, return_lse=True)
        alone = ft.attention(*given, **options)
        assert len(cache.KNOWN) == 1
        cache.KNOWN.clear()
        wanted = ft.attention(*given, **options, return_lse=True)
        for a, b in zip((*found, alone), (*wanted, wanted[0]), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        cache.KNOWN.clear()


def test_each_seed_has_its_own_bits() -> None:
    given = arrays()
    found = [ft.attention(*given, dropout=0.5, seed=seed) for seed in (1, 2, 1)]
    assert len(cache.KNOWN) == 1
    np.testing.assert_array_equal(found[0], found[2])
    assert (found[0] != found[1]).any()


def test_other_strides_and_widths() -> None:
    q, k, v = arrays()
    calls = [
        (q, k, v),
        (q[:, ::-1], k, v),
        (q.swapaxes(1, 2).copy().swapaxes(1, 2), k, v),
        (q, k[:, :, :7], v[:, :, :7]),
        (q, k, v[..., :9].copy()),
        (q, k[:, :2], v[:, :2]),
    ]
    for call in calls * 2:
        np.testing.assert_allclose(ft.attention(*call), ft.standard_attention(*call), atol=1e-5)
    assert len(cache.KNOWN) == len(calls)


@pytest.mark.parametrize("how", ["mask", "bias", "kv_lengths", "out_dtype", "large"])
def test_what_is_cached(how: str) -> None:
    q, k, v = arrays()
    long = tuple(x.reshape(1, 1, -1, 1)[:, :, :40] for x in arrays(1, shape=(1, 1, 1 << 15, 1)))
    calls: dict[str, tuple[tuple[Any, ...], list[dict[str, Any]]]] = {
        "mask": ((q, k, v), [{"mask": np.tri(20, dtype=bool)}, {"mask": np.tri(20, dtype=bool).T.copy()}]),
        "bias": ((q, k, v), [{"bias": x} for x in np.random.default_rng(0).random((2, 20, 20), np.float32)]),
        "kv_lengths": ((q, k, v), [{"kv_lengths": np.array([3, 20])}, {"kv_lengths": np.array([9, 0])}]),
        "out_dtype": ((q, k, v), [{"out_dtype": "float32"}]),
        "large": ((arrays(1, shape=(1, 1, 1 << 15, 1))[0], *long[1:]), [{}]),
    }
    given, several = calls[how]
    for options in several * 2:
        found = ft.attention(*given, **options)
        np.testing.assert_array_equal(found, ft.attention(*(x.copy() for x in given), **options, backend="native"))
        if how != "large":
            exact = {name: x for name, x in options.items() if name != "out_dtype"}
            np.testing.assert_allclose(found, ft.standard_attention(*given, **exact), atol=1e-5)
    assert len(cache.KNOWN) == 2


@pytest.mark.parametrize("how", ["dtype", "column", "unaligned", "unaligned bias", "subclass", "empty", "tiles"])
def test_what_is_not_cached(how: str) -> None:
    q, k, v = arrays()
    shifted, bias = (np.empty(n * 4 + 1, np.uint8)[1:].view(np.float32) for n in (q.size, 400))
    shifted, bias = shifted.reshape(q.shape), bias.reshape(20, 20)
    shifted[...], bias[...] = q, 0
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "dtype": (tuple(x.astype(">f4").astype("f4").view(type("A", (np.ndarray,), {})) for x in (q, k, v)), {}),
        "column": ((q[..., ::2], k[..., ::2], v[..., ::2]), {}),
        "unaligned": ((shifted, k, v), {}),
        "unaligned bias": ((q, k, v), {"bias": bias}),
        "subclass": ((q.view(type("A", (np.ndarray,), {})), k, v), {}),
        "empty": ((q[:, :, :0], k, v), {}),
        "tiles": ((q, k, v), {"backend": "tiles"}),
    }
    given, options = calls[how]
    for _ in range(2):
        out = ft.attention(*given, **options)
    assert not cache.KNOWN
    plain = {name: x for name, x in options.items() if name != "backend"}
    np.testing.assert_allclose(out, ft.standard_attention(*given, **plain), atol=1e-5)


def test_wrong_calls_are_refused_after_right_ones() -> None:
    q, k, v = arrays()
    for _ in range(2):
        ft.attention(q, k, v, causal=True)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q, k[..., :8], v), {}, "k: expected head dim"),
        ((q, k.astype(np.float64), v), {}, "k: expected float32 like q"),
        ((q, None, v), {}, "k: expected a NumPy array like q"),
        ((q, k, [1]), {}, "v: expected a NumPy array like q"),
        ((q, k, v), {"causal": 1}, "causal: expected True or False"),
        ((q, k, v), {"causal": 1.0}, "causal: expected True or False"),
        ((q, k, v), {"window": (True, 2)}, "window: expected an integer"),
        ((q, k, v), {"seed": -1, "dropout": 0.5}, "seed: expected an integer"),
        ((q, k, v), {"backend": "unknown"}, "backend: expected one of"),
        ((q, k, v), {"threads": 0}, "threads: expected an integer"),
    ]
    for given, options, words in wrong:
        with pytest.raises(ft.FlashtileError, match=f"^{words}"):
            ft.attention(*given, **options)
    assert len(cache.KNOWN) == 1


class Index:
    value = 3

    def __index__(self) -> int:
        return self.value


def test_numbers_that_may_change_are_read_each_time() -> None:
    given, number = arrays(), Index()
    first = ft.attention(*given, window=(number, 0))
    number.value = 1
    assert (ft.attention(*given, window=(number, 0)) != first).any() and not cache.KNOWN


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 3)
    for n in range(1, 9):
        ft.attention(*arrays(shape=(n, 4)))
    assert 1 <= len(cache.KNOWN) <= 3
