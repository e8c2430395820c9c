"""Cached calls on a CPU: the second of a kind goes straight to the core, with the same results."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.backends import native
from flashtile.backends.native import runner
from flashtile.host import threads

torch = pytest.importorskip("torch")

from flashtile.pytorch import calls  # noqa: E402

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no C++ core")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_known", {})


def tensors(seed: int = 0, dtype: Any = torch.float32, shape: tuple[int, ...] = (2, 4, 20, 16)) -> list[Any]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng).to(dtype) for _ in range(3)]


def cached() -> int:
    return sum(map(len, calls._known.values()))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "band": {"band": ft.Band(3, 2, 1)},
    "scores": {"softcap": 2.0, "scale": 0.3},
    "dropout": {"dropout": 0.5, "seed": 7},
    "unrounded": {"out_dtype": torch.float32},
    "explicit": {"backend": "native", "threads": 1, "deterministic": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_cached_calls_have_the_same_bits(name: str, dtype: Any) -> None:
    for shape in ((2, 4, 20, 16), (4, 20, 16), (20, 16)):
        options = OPTIONS[name]
        given = tensors(1, dtype, shape)
        first = ft.attention(*tensors(0, dtype, shape), **options)
        assert cached() == 1
        out, lse = ft.attention(*given, **options, return_lse=True)
        assert cached() == 1 and out.dtype == first.dtype and out.is_contiguous() and lse.is_contiguous()
        calls._known.clear()
        wanted = ft.attention(*given, **options, return_lse=True)
        for found, exact in zip((out, lse), wanted, strict=True):
            assert found.shape == exact.shape and found.dtype == exact.dtype and torch.equal(found, exact)
        assert torch.equal(ft.attention(*given, **options), out)
        calls._known.clear()


def test_each_seed_has_its_own_bits() -> None:
    given = tensors()
    found = [ft.attention(*given, dropout=0.5, seed=seed) for seed in (1, 2, 2**63 + 1, 1, np.int64(2))]
    assert cached() == 1
    assert torch.equal(found[0], found[3]) and torch.equal(found[1], found[4])
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_shared_heads_strides_and_expanded_keys() -> None:
    rng = torch.Generator().manual_seed(3)
    q = torch.randn(1, 1, 8, 32, generator=rng).transpose(1, 2)
    cache = torch.randn(2, 1, 2, 100, 32, generator=rng)
    for n in (40, 41, 40):
        k, v = cache[:, :, :, :n]
        out = ft.attention(q, k, v)
        exact = ft.standard_attention(q.numpy(), k.numpy(), v.numpy())
        np.testing.assert_allclose(out.numpy(), exact, atol=1e-5)
    assert cached() == 2
    k = cache[0, :, :1].expand(1, 8, 100, 32)
    for _ in range(2):
        out = ft.attention(q, k, k)
        np.testing.assert_allclose(out.numpy(), ft.standard_attention(q.numpy(), k.numpy(), k.numpy()), atol=1e-5)


def test_gradients_of_cached_calls() -> None:
    results = []
    for _ in range(3):
        leaves = [x.requires_grad_() for x in tensors(5)]
        out, lse = ft.attention(*leaves, causal=True, return_lse=True)
        (out.square().sum() + lse.sum()).backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    assert cached() == 1
    for each in results[1:]:
        assert all(map(torch.equal, each, results[0]))


def option(name: str, seed: int) -> Any:
    rng = torch.Generator().manual_seed(seed)
    return {
        "mask": torch.rand(2, 1, 1, 20, generator=rng) < 0.7,
        "bias": torch.randn(20, 20, generator=rng),
        "alibi": torch.rand(4, generator=rng),
        "sink": torch.randn(4, generator=rng),
    }[name]


@pytest.mark.parametrize("name", ["mask", "bias", "alibi", "sink"])
def test_options_that_are_tensors(name: str) -> None:
    for seed in range(3):
        given, more = tensors(seed), option(name, seed)
        found = ft.attention(*given, **{name: more}, return_lse=True)
        assert cached() == 1
        arrays = [x.numpy() for x in given]
        wanted = ft.attention(*arrays, **{name: more.numpy()}, return_lse=True, backend="native")
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a.numpy(), b)


def test_gradients_of_a_bias_and_a_sink() -> None:
    results = []
    for _ in range(2):
        leaves = [x.requires_grad_() for x in tensors(5)]
        bias, sink = option("bias", 1).requires_grad_(), option("sink", 2).requires_grad_()
        ft.attention(*leaves, bias=bias, sink=sink).square().sum().backward()
        results.append([x.grad for x in (*leaves, bias, sink)])
    assert cached() == 1 and all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_read_each_time(dtype: Any) -> None:
    given = tensors()
    arrays = [x.numpy() for x in given]
    for lengths in ([5, 20], [20, 0], [7, 7]):
        found = ft.attention(*given, causal=True, kv_lengths=torch.tensor(lengths, dtype=dtype))
        wanted = ft.attention(*arrays, causal=True, kv_lengths=np.array(lengths), backend="native")
        np.testing.assert_array_equal(found.numpy(), wanted)
    assert cached() == 1
    for wrong in ([5, 21], [-1, 5]):
        with pytest.raises(
            ft.ShapeError, match=r"^kv_lengths: expected values from 0 to the number of keys \(20\), got"
        ):
            ft.attention(*given, causal=True, kv_lengths=torch.tensor(wrong, dtype=dtype))


def test_large_calls_are_cached_too() -> None:
    large = (1, 1, 1 << 15, 2)
    wanted = ft.attention(*tensors(shape=large), window=(3, 0))
    for _ in range(2):
        assert torch.equal(ft.attention(*tensors(shape=large), window=(3, 0)), wanted)
    assert cached() == 1


def test_other_backends_and_copies_are_not_cached() -> None:
    ft.attention(*tensors(), backend="tiles")
    ft.attention(*(x[..., ::2] for x in tensors()))  # copied first
    ft.attention(*(x[:, :, :0] for x in tensors()))
    assert cached() == 0


def test_the_number_of_threads_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def forward(words: Any) -> int:
        used.append(words[runner.THREADS])
        return 0

    monkeypatch.setattr(runner.library, "load", lambda: SimpleNamespace(ft_forward=forward, ft_backward=None))
    monkeypatch.setattr(threads, "from_environment", lambda: None)
    before = torch.get_num_threads()
    try:
        for n in (1, 2, 1):
            torch.set_num_threads(n)
            ft.attention(*tensors())
        ft.attention(*tensors(), threads=3)
        ft.attention(*tensors(), threads=np.int64(3))
        monkeypatch.setattr(threads, "from_environment", lambda: 5)
        calls._known.clear()  # the environment is read once
        ft.attention(*tensors())
    finally:
        torch.set_num_threads(before)
    assert used == [1, 2, 1, 3, 3, 5]


def test_wrong_calls_are_refused_after_right_ones() -> None:
    q, k, v = tensors()
    ft.attention(q, k, v)
    ft.attention(q, k, v)
    with pytest.raises(ft.ShapeError, match=r"^k: expected head dim"):
        ft.attention(q, k[..., :8], v)
    with pytest.raises(ft.DTypeError, match=r"^k: expected float32 like q"):
        ft.attention(q, k.double(), v)
    with pytest.raises(ft.DTypeError, match=r"^v: expected a torch tensor like q, got ndarray"):
        ft.attention(q, k, v.numpy())
    with pytest.raises(ft.DTypeError, match=r"^k: expected a torch tensor like q, got NoneType"):
        ft.attention(q, None, v)
    with pytest.raises(ft.DTypeError, match=r"^return_lse"):
        ft.attention(q, k, v, return_lse=1)
    with pytest.raises(ft.UnsupportedError, match=r"^backend: expected one of"):
        ft.attention(q, k, v, backend="unknown")
    assert cached() == 1


def test_a_tensor_passed_twice() -> None:
    x, y = tensors(4)[:2]
    for _ in range(3):
        assert torch.equal(ft.attention(x, x, x), ft.attention(x, x.clone(), x.clone()))
        assert torch.equal(ft.attention(x, y, y), ft.attention(x, y, y.clone()))
    assert cached() == 3  # one entry for all calls of distinct tensors


def test_the_cache_holds_no_tensors() -> None:
    given = tensors()
    out = ft.attention(*given)
    ft.attention(*given)
    alive = [weakref.ref(x) for x in (*given, out)]
    del given, out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_transforms_and_modes_agree() -> None:
    q, k, v = tensors(9)
    exact = ft.attention(q, k, v, causal=True)
    assert torch.equal(ft.attention(q, k, v, causal=True), exact)
    mapped = torch.vmap(lambda a, b, c: ft.attention(a, b, c, causal=True))(q, k, v)
    torch.testing.assert_close(mapped, exact)
    back = torch.func.grad(lambda a: ft.attention(a, k, v, causal=True).sum())
    torch.testing.assert_close(back(q), back(q))
    with torch.inference_mode():
        assert torch.equal(ft.attention(q, k, v, causal=True), exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert ft.attention(q, k, v, causal=True).dtype is torch.bfloat16
