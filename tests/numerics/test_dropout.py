"""Dropout: Philox's known answers, the same bits on every backend and for every tile size, right gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

import flashtile as ft
from flashtile.numerics.dropout import keep, philox, threshold
from tests.backends.native.core import c_keep, needs_native
from tests.support import brute_force
from tests.support.grid import Call
from tests.support.runners import Runner, every_runner

# Known answers of the Random123 distribution, philox4x32-10: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(w, 16) for w in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    low, high = words(key)
    seed = low | high << 32
    assert [int(x) for x in philox(seed, tuple(words(counter)))] == words(answer)
    assert list(brute_force.philox(seed, tuple(words(counter)))) == words(answer)


SEEDS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("head", [0, 1, 77, 2**31 + 5])
def test_keep_uses_one_word_per_pair(seed: int, head: int) -> None:
    i, j = np.array([0, 3, 2**31 + 1])[:, None], np.array([0, 1, 2, 3, 4, 5, 11, 2**33 + 2])[None, :]
    found = keep(seed, head, i, j, 0.5)
    for a, b in np.ndindex(found.shape):
        # Counters are 32-bit words: larger numbers wrap.
        block = (int(j[0, b]) // 4 & 0xFFFFFFFF, int(i[a, 0]) & 0xFFFFFFFF, head, 0)
        assert found[a, b] == (brute_force.philox(seed, block)[int(j[0, b]) % 4] >= 2**31)


@needs_native
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dropout", [0.0, 1e-9, 0.1, 0.5, 0.9999999999])
def test_the_cpp_version_is_equal(seed: int, dropout: float) -> None:
    for head in (0, 3, 2**31 + 5):
        for i in (0, 1, 1000003):
            for j, n in ((0, 1), (1, 3), (3, 300), (4, 64), (2**31 - 2, 9)):
                expected = keep(seed, head, i, np.arange(j, j + n), dropout)
                np.testing.assert_array_equal(c_keep(seed, head, i, j, n, dropout), expected)


def test_threshold() -> None:
    assert threshold(0.0) == 0 and threshold(0.5) == 2**31
    assert threshold(math.nextafter(1, 0)) == 2**32 - 1
    assert keep(0, 0, np.arange(40)[:, None], np.arange(40), 0.0).all()


def bits_of(runner: Runner, n_q: int, n_k: int, heads: int, dropout: float, seed: int) -> np.ndarray:
    """Which weights a backend keeps, read from its output: equal scores, and an identity matrix as v."""
    q, k = np.zeros((2, heads, n_q, 8), np.float32), np.zeros((2, 1, n_k, 8), np.float32)
    v = np.broadcast_to(np.eye(n_k, dtype=np.float32), (2, 1, n_k, n_k))
    options = {"dropout": dropout, "seed": seed}
    out, lse = runner.forward(Call(q, k, v, options, None, None))
    np.testing.assert_allclose(lse, math.log(n_k), rtol=1e-6, err_msg="the lse includes dropped weights")
    kept = out > 0
    np.testing.assert_allclose(out[kept], 1 / n_k / (1 - dropout), rtol=1e-5)
    return kept


@every_runner
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 300), (3, 257), (65, 63), (140, 129)])
@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.95])
def test_the_same_bits_everywhere(n_q: int, n_k: int, dropout: float, runner: Runner) -> None:
    seed, heads = 2**40 + 9, 3
    found = bits_of(runner, n_q, n_k, heads, dropout, seed)
    for s, h in np.ndindex(2, heads):
        expected = keep(seed, s * heads + h, np.arange(n_q)[:, None], np.arange(n_k), dropout)
        np.testing.assert_array_equal(found[s, h], expected)


@every_runner
def test_packed_counts_within_each_sequence(runner: Runner) -> None:
    """i and j start at 0 in every sequence; the head number counts over sequences."""
    n, heads = [(5, 40), (0, 3), (17, 33)], 2
    cu_q, cu_k = (np.cumsum([0, *x]) for x in zip(*n, strict=True))
    q, k = np.zeros((cu_q[-1], heads, 4)), np.zeros((cu_k[-1], heads, 4))
    v = np.zeros((cu_k[-1], heads, 40))
    for s, (_, n_k) in enumerate(n):
        v[cu_k[s] : cu_k[s + 1], :, :n_k] = np.eye(n_k)[:, None]
    call = Call(q, k, v, {"dropout": 0.4, "seed": 5}, None, None, {"cu_q": cu_q, "cu_k": cu_k})
    out, _ = runner.forward(call)
    for s, (n_q, n_k) in enumerate(n):
        for h in range(heads):
            expected = keep(5, s * heads + h, np.arange(n_q)[:, None], np.arange(n_k), 0.4)
            np.testing.assert_array_equal(out[cu_q[s] : cu_q[s + 1], h, :n_k] > 0, expected)


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_keep_rate_within_the_binomial_bound(dropout: float, seed: int) -> None:
    n = 512
    kept = keep(seed, 7, np.arange(n)[:, None], np.arange(n), dropout)
    deviation = math.sqrt(dropout * (1 - dropout) / n**2)
    assert abs(kept.mean() - (1 - dropout)) < 5 * deviation
    for axis in (0, 1):  # the rate is the same in every row and column
        rates = kept.mean(axis=axis)
        assert np.abs(rates - (1 - dropout)).max() < 6 * deviation * math.sqrt(n)


def test_seeds_heads_rows_and_keys_are_independent() -> None:
    i, j = np.arange(256)[:, None], np.arange(256)
    planes = [keep(s, h, i, j, 0.5) for s in (0, 1, 2**32) for h in (0, 1)]
    planes += [keep(0, 0, i + 1, j, 0.5), keep(0, 0, i, j + 1, 0.5)]
    for a in range(len(planes)):
        for b in range(a):
            assert abs((planes[a] == planes[b]).mean() - 0.5) < 5 / (2 * 256)


@every_runner
def test_gradients_are_those_of_the_dropped_weights(runner: Runner) -> None:
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((2, 2, n, 5)) for n in (11, 13, 13, 11))
    call = Call(q, k, v, {"dropout": 0.4, "seed": 9, "causal": True}, dout, np.zeros((2, 2, 11)))
    out, lse = runner.forward(call)
    grads = runner.backward(call, out, lse)
    for name in "qkv":
        x = getattr(call, name)
        along = rng.standard_normal(x.shape)

        def loss(t: float, name: str = name, step: np.ndarray = along) -> float:
            moved = {"q": q, "k": k, "v": v, name: getattr(call, name) + t * step}
            return float((ft.standard_attention(**moved, **call.options) * dout).sum())

        slope = (8 * (loss(1e-3) - loss(-1e-3)) - (loss(2e-3) - loss(-2e-3))) / 12e-3
        assert (getattr(grads, "d" + name) * along).sum() == pytest.approx(slope, rel=1e-7, abs=1e-8), name


@every_runner
def test_dropout_zero_is_no_dropout(runner: Runner) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 2, n, 5)).astype(np.float32) for n in (11, 13, 13))
    a, _ = runner.forward(Call(q, k, v, {"dropout": 0.0, "seed": 9}, None, None))
    b, _ = runner.forward(Call(q, k, v, {}, None, None))
    np.testing.assert_array_equal(a, b)
