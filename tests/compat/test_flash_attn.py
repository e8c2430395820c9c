"""compat.flash_attn against a naive softmax: every function, every option, gradients, and the KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flashtile as ft
from flashtile.compat import flash_attn as fa
from tests.backends.native.core import needs_native

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_varlen_func": (
        f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {TAIL}, block_table=None"
    ),
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "left": {"window_size": (2, -1)},
    "right": {"window_size": (-1, 1)},
    "window": {"window_size": (3, 2)},
    "diagonal": {"window_size": (0, 0)},
    "causal window": {"window_size": (2, 4), "causal": True},
    "causal left": {"window_size": (2, -1), "causal": True},
    "causal right": {"window_size": (-1, 3), "causal": True},
    "wide window": {"window_size": (100, 100)},
    "scale": {"softmax_scale": 0.9},
    "softcap": {"softcap": 1.5},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    "slopes of each sequence": {"alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 1.0], [1.0, 0.0, 2.0, 0.1]])},
    "everything": {
        "causal": True,
        "window_size": (4, 1),
        "softcap": 2.0,
        "softmax_scale": 0.7,
        "alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 1.0], [1.0, 0.0, 2.0, 0.1]]),
    },
}
PLAIN = {
    name: OPTIONS[name] for name in ("plain", "causal", "window", "softcap", "slopes of each sequence", "everything")
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
some_options = pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN.keys())
every_length = pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 8)])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    fixed = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=fixed, dtype=torch.float64).to(dtype).requires_grad_(grad)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Naive attention of one sequence in float64: (rows, heads, dim), and the lse, (heads, rows)."""
    q, k, v = q.double(), k.double(), v.double()
    Sq, H, D = q.shape
    Sk, Hk, _ = k.shape
    k, v = k.repeat_interleave(H // Hk, 1), v.repeat_interleave(H // Hk, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (D**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    ahead = torch.arange(Sk)[None, :] - (torch.arange(Sq)[:, None] + Sk - Sq)
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * ahead.abs()
    left, right = window_size
    right = 0 if causal else right
    seen = torch.ones(Sq, Sk, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    some = seen.any(-1)
    out, lse = torch.zeros(Sq, H, v.shape[-1], dtype=torch.float64), torch.full((H, Sq), torch.inf).double()
    if some.any():
        s = s[:, some].masked_fill(~seen[some], -torch.inf)
        out = out.index_put((some,), torch.einsum("hij,jhd->ihd", s.softmax(-1), v))
        lse[:, some] = s.detach().logsumexp(-1)
    else:
        out = out + 0 * (q.sum() + k.sum() + v.sum())
    return out, lse


def slopes_of(slopes: Tensor | None, b: int) -> Tensor | None:
    """The slopes of one sequence."""
    return slopes if slopes is None or slopes.ndim == 1 else slopes[b]


def naive_batch(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    parts = [naive(q[b], k[b], v[b], slopes=slopes_of(alibi_slopes, b), **options) for b in range(len(q))]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def naive_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    len_q: list[int],
    len_k: list[int],
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    sequences = zip(q.split(len_q), k.split(len_k), v.split(len_k), strict=True)
    parts = [naive(*x, slopes=slopes_of(alibi_slopes, b), **options) for b, x in enumerate(sequences)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def close(found: Tensor, wanted: Tensor) -> None:
    """Check equality within the rounding of the dtype of `found`."""
    tolerance = 1e-9 if found.dtype == torch.float64 else 2e-5
    assert found.shape == wanted.shape
    assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance * 1e-1)


def agree(run: Callable[..., Any], want: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> None:
    """Check that run(*inputs, return_attn_probs=) gives the output, lse and gradients of want(*inputs)."""
    out, lse, probs = run(*inputs, return_attn_probs=True)
    want_out, want_lse = want(*inputs)
    assert probs is None and out.dtype == inputs[0].dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    close(out, want_out)
    close(lse, want_lse)
    alone = run(*inputs)
    assert isinstance(alone, Tensor) and alone.is_contiguous() and torch.equal(alone, out)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    wanted = torch.autograd.grad((want_out * weight).sum(), inputs)
    for x in (out, alone):
        for found, right in zip(torch.autograd.grad((x * weight).sum(), inputs), wanted, strict=True):
            close(found, right)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    ours = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]  # after all of theirs
    assert ours == (["seqused_k", "out"] if name == "flash_attn_varlen_func" else [])
    theirs = [p for p in parameters if p.name not in ours]
    assert {p.kind for p in theirs} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    empty = inspect.Parameter.empty
    assert ", ".join(p.name if p.default is empty else f"{p.name}={p.default!r}" for p in theirs) == SIGNATURES[name]


class TestBatches:
    @every_option
    @every_length
    def test_grouped_heads(self, lengths: tuple[int, int], options: dict[str, Any]) -> None:
        Sq, Sk = lengths
        inputs = [randn(2, n, h, 8, seed=i, grad=True) for i, (n, h) in enumerate([(Sq, 4), (Sk, 2), (Sk, 2)])]
        agree(lambda *x, **o: fa.flash_attn_func(*x, **options, **o), lambda *x: naive_batch(*x, **options), inputs)

    @some_options
    @pytest.mark.parametrize("heads", [1, 2, 4])
    def test_float32(self, heads: int, options: dict[str, Any]) -> None:
        inputs = [
            randn(2, n, h, 16, seed=i, dtype=torch.float32, grad=True)
            for i, (n, h) in enumerate([(11, 4), (17, heads), (17, heads)])
        ]
        agree(lambda *x, **o: fa.flash_attn_func(*x, **options, **o), lambda *x: naive_batch(*x, **options), inputs)

    @some_options
    def test_qkvpacked(self, options: dict[str, Any]) -> None:
        agree(
            lambda qkv, **o: fa.flash_attn_qkvpacked_func(qkv, **options, **o),
            lambda qkv: naive_batch(*qkv.unbind(2), **options),
            [randn(2, 9, 3, 4, 8, grad=True)],
        )

    @some_options
    @every_length
    def test_kvpacked(self, lengths: tuple[int, int], options: dict[str, Any]) -> None:
        agree(
            lambda q, kv, **o: fa.flash_attn_kvpacked_func(q, kv, **options, **o),
            lambda q, kv: naive_batch(q, *kv.unbind(2), **options),
            [randn(2, lengths[0], 4, 8, grad=True), randn(2, lengths[1], 2, 2, 8, seed=1, grad=True)],
        )

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        q, k, v = (randn(2, 9, 2, 16, seed=i, dtype=dtype) for i in range(3))
        out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        want, want_lse = naive_batch(q, k, v, causal=True)
        assert out.dtype == dtype and lse.dtype == torch.float32
        assert_close(out.double(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)
        close(lse, want_lse)

    def test_rows_that_see_no_key(self) -> None:
        q, k, v = (randn(1, n, 2, 8, seed=n, grad=True) for n in (9, 4, 4))
        out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        assert (out[:, :5] == 0).all() and (lse[:, :, :5] == torch.inf).all() and lse[:, :, 5:].isfinite().all()
        (dq,) = torch.autograd.grad(out.sum(), (q,))
        assert (dq[:, :5] == 0).all() and dq.isfinite().all()

    @pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
    def test_no_rows(self, lengths: tuple[int, int]) -> None:
        Sq, Sk = lengths
        out, lse, _ = fa.flash_attn_func(
            randn(2, Sq, 4, 8), randn(2, Sk, 2, 8), randn(2, Sk, 2, 8), return_attn_probs=True
        )
        assert out.shape == (2, Sq, 4, 8) and (out == 0).all()
        assert lse.shape == (2, 4, Sq) and (Sk > 0 or (lse == torch.inf).all())

    def test_deterministic_changes_nothing(self) -> None:
        q, k, v = (randn(2, 9, 2, 8, seed=i) for i in range(3))
        assert torch.equal(fa.flash_attn_func(q, k, v, deterministic=True), fa.flash_attn_func(q, k, v))

    def test_inputs_of_any_strides(self) -> None:
        q, k, v = (randn(2, 2, 9, 8, seed=i).transpose(1, 2) for i in range(3))
        out = fa.flash_attn_func(q, k, v, causal=True)
        assert out.is_contiguous()
        close(out, naive_batch(q, k, v, causal=True)[0])

    @pytest.mark.parametrize("make", [list, torch.tensor])
    def test_a_window_that_is_not_a_tuple(self, make: Any) -> None:
        q, k, v = (randn(2, 9, 2, 8, seed=i) for i in range(3))
        for window in ((3, 1), (-1, 2), (-1, -1)):
            want = fa.flash_attn_func(q, k, v, window_size=window)
            assert torch.equal(fa.flash_attn_func(q, k, v, window_size=make(window)), want)
            found = fa.flash_attn_with_kvcache(q, k, v, window_size=make(window))
            assert torch.equal(found, want)

    def test_positions_of_arguments(self) -> None:
        q, k, v = (randn(2, 9, 4, 8, seed=i) for i in range(3))
        slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
        out, lse, probs = fa.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, 2), 1.5, slopes, True, True)
        want = naive_batch(
            q, k, v, softmax_scale=0.3, causal=True, window_size=(3, 2), softcap=1.5, alibi_slopes=slopes
        )
        close(out, want[0])
        close(lse, want[1])
        assert probs is None


VARLEN = {
    "even": ([6, 6], [6, 6]),
    "longer keys": ([3, 5], [9, 5]),
    "shorter keys": ([8, 2], [3, 7]),
    "empty queries": ([0, 4], [5, 6]),
    "empty keys": ([4, 3], [6, 0]),
}
every_varlen = pytest.mark.parametrize("lengths", VARLEN.values(), ids=VARLEN.keys())


class TestPackedSequences:
    @every_option
    @every_varlen
    def test_grouped_heads(self, lengths: tuple[list[int], list[int]], options: dict[str, Any]) -> None:
        len_q, len_k = lengths
        cu = starts(len_q), starts(len_k), max(len_q), max(len_k)
        inputs = [
            randn(sum(n), h, 8, seed=i, grad=True) for i, (n, h) in enumerate([(len_q, 4), (len_k, 2), (len_k, 2)])
        ]
        agree(
            lambda q, k, v, **o: fa.flash_attn_varlen_func(q, k, v, *cu, **options, **o),
            lambda q, k, v: naive_varlen(q, k, v, len_q, len_k, **options),
            inputs,
        )

    @some_options
    def test_qkvpacked(self, options: dict[str, Any]) -> None:
        lengths = [5, 8]
        agree(
            lambda qkv, **o: fa.flash_attn_varlen_qkvpacked_func(qkv, starts(lengths), 8, **options, **o),
            lambda qkv: naive_varlen(*qkv.unbind(1), lengths, lengths, **options),
            [randn(13, 3, 4, 8, dtype=torch.float32, grad=True)],
        )

    @some_options
    @every_varlen
    def test_kvpacked(self, lengths: tuple[list[int], list[int]], options: dict[str, Any]) -> None:
        len_q, len_k = lengths
        cu = starts(len_q), starts(len_k), max(len_q), max(len_k)
        agree(
            lambda q, kv, **o: fa.flash_attn_varlen_kvpacked_func(q, kv, *cu, **options, **o),
            lambda q, kv: naive_varlen(q, *kv.unbind(1), len_q, len_k, **options),
            [randn(sum(len_q), 4, 8, grad=True), randn(sum(len_k), 2, 2, 8, seed=1, grad=True)],
        )

    @every_option
    @pytest.mark.parametrize("page", [1, 3, 4, 16])
    def test_pages(self, page: int, options: dict[str, Any]) -> None:
        len_q, len_k = [3, 6], [10, 5]
        k, v = randn(15, 2, 8, seed=1), randn(15, 2, 8, seed=2)
        k_pages, v_pages, table = in_pages([k.split(len_k), v.split(len_k)], page, 16)
        q = randn(9, 4, 8)
        out, lse, _ = fa.flash_attn_varlen_func(
            *(q, k_pages, v_pages, starts(len_q), starts(len_k), 6, 10),
            **options,
            block_table=table,
            return_attn_probs=True,
        )
        want_out, want_lse = naive_varlen(q, k, v, len_q, len_k, **options)
        close(out, want_out)
        close(lse, want_lse)

    @pytest.mark.parametrize("pages", [False, True])
    @some_options
    def test_keys_in_use(self, pages: bool, options: dict[str, Any]) -> None:
        """seqused_k, with NaN in the unused keys, and the caller's own output tensor."""
        len_q, room, used = [3, 6], [10, 7], [8, 3]
        k, v = randn(17, 2, 8, seed=1), randn(17, 2, 8, seed=2)
        parts = [[x[:n] for x, n in zip(y.split(room), used, strict=True)] for y in (k, v)]
        q, seqused = randn(9, 4, 8), torch.tensor(used, dtype=torch.int32)
        want_out, want_lse = naive_varlen(q, torch.cat(parts[0]), torch.cat(parts[1]), len_q, used, **options)
        how: dict[str, Any] = {"seqused_k": seqused, "return_attn_probs": True, **options}
        if pages:
            k_pages, v_pages, how["block_table"] = in_pages(parts, 4, 12)
            given = q, k_pages, v_pages, starts(len_q), None, 6, 8
        else:
            for x in (k, v):
                x[8:10] = x[13:] = torch.nan
            given = q, k, v, starts(len_q), starts(room), 6, 10
        found, lse, _ = fa.flash_attn_varlen_func(*given, **how)
        close(found, want_out)
        close(lse, want_lse)
        mine = torch.full((9, 4, 8), torch.nan, dtype=torch.float64)
        again, _, _ = fa.flash_attn_varlen_func(*given, **how, out=mine)
        assert again is mine and torch.equal(mine, found)
        assert fa.flash_attn_varlen_func(*given, **how | {"return_attn_probs": False}, out=mine) is mine

    def test_an_output_that_does_not_fit(self) -> None:
        q, two = randn(10, 2, 8), starts([5, 5])
        for wrong, name in (
            (torch.zeros(10, 2, 4).double(), "out: expected shape"),
            (torch.zeros(10, 2, 8), "out: expected torch.float64"),
        ):
            with pytest.raises(RuntimeError, match=name):
                fa.flash_attn_varlen_func(q, q, q, two, two, 5, 5, out=wrong)
        with pytest.raises(RuntimeError, match="out: expected None, because a gradient is needed"):
            fa.flash_attn_varlen_func(q.requires_grad_(), q, q, two, two, 5, 5, out=torch.zeros(10, 2, 8).double())
        with pytest.raises(RuntimeError, match="cu_seqlens_k: expected"):
            fa.flash_attn_varlen_func(q, q, q, two, None, 5, 5)


def in_pages(tensors: list[Any], page: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values of sequences on shuffled pages, NaN where unused, and the table."""
    batch, columns = len(tensors[0]), -(-room // page)
    order = torch.randperm(batch * columns + 2, generator=torch.Generator().manual_seed(7))
    table = order[: batch * columns].reshape(batch, columns).int()
    pages = []
    for sequences in tensors:
        x = torch.full((len(order), page, *sequences[0].shape[1:]), torch.nan, dtype=sequences[0].dtype)
        for b, sequence in enumerate(sequences):
            for j, row in enumerate(sequence):
                x[table[b, j // page], j % page] = row
        pages.append(x)
    return pages[0], pages[1], table


@st.composite
def any_options(draw: st.DrawFn, batch: int, heads: int) -> dict[str, Any]:
    slopes = draw(st.sampled_from([None, (heads,), (batch, heads)]))
    return {
        "causal": draw(st.booleans()),
        "window_size": (draw(st.integers(-1, 7)), draw(st.integers(-1, 7))),
        "softcap": draw(st.sampled_from([0.0, 0.7, 5.0])),
        "softmax_scale": draw(st.none() | st.floats(0.1, 2)),
        "alibi_slopes": None if slopes is None else randn(*slopes, seed=9, dtype=torch.float32).abs(),
    }


@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    draw, sizes = data.draw, st.integers(1, 9)
    batch, Hk, group, Sq, Sk, D = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), *[sizes] * 3))
    options = draw(any_options(batch, Hk * group))
    inputs = [randn(batch, n, h, D, seed=n, grad=True) for n, h in ((Sq, Hk * group), (Sk, Hk))]
    inputs.append(randn(batch, Sk, Hk, D, seed=50, grad=True))
    agree(lambda *x, **o: fa.flash_attn_func(*x, **options, **o), lambda *x: naive_batch(*x, **options), inputs)


@given(data=st.data())
def test_any_packed_sequences(data: st.DataObject) -> None:
    draw = data.draw
    pairs = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=4))
    len_q, len_k = [a for a, _ in pairs], [b for _, b in pairs]
    Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    options = draw(any_options(len(pairs), Hk * group))
    cu = starts(len_q), starts(len_k), max(len_q), max(len_k)
    shapes = (sum(len_q), Hk * group, 4), (sum(len_k), Hk, 4), (sum(len_k), Hk, 4)
    agree(
        lambda q, k, v, **o: fa.flash_attn_varlen_func(q, k, v, *cu, **options, **o),
        lambda q, k, v: naive_varlen(q, k, v, len_q, len_k, **options),
        [randn(*shape, seed=i, grad=True) for i, shape in enumerate(shapes)],
    )


class TestDropout:
    def calls(self, p: float) -> list[Callable[[], Tensor]]:
        """One call of each function that can drop weights."""
        x, packed = randn(2, 16, 3, 4, 8), randn(32, 3, 4, 8)
        cu = starts([16, 16])
        two = cu, cu, 16, 16
        return [
            lambda: fa.flash_attn_func(*x.unbind(2), p),
            lambda: fa.flash_attn_qkvpacked_func(x, p),
            lambda: fa.flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 1:], p),
            lambda: fa.flash_attn_varlen_func(*packed.unbind(1), *two, p),
            lambda: fa.flash_attn_varlen_qkvpacked_func(packed, cu, 16, p),
            lambda: fa.flash_attn_varlen_kvpacked_func(packed[:, 0], packed[:, 1:], *two, p),
        ]

    @pytest.mark.parametrize("which", range(6))
    def test_the_seed_comes_from_torch(self, which: int) -> None:
        call = self.calls(0.3)[which]
        torch.manual_seed(5)
        first, second = call(), call()
        torch.manual_seed(5)
        assert torch.equal(call(), first) and torch.equal(call(), second)
        assert not torch.equal(first, second)

    @pytest.mark.parametrize("which", range(6))
    def test_without_dropout_no_number_is_drawn(self, which: int) -> None:
        before = torch.get_rng_state()
        self.calls(0.0)[which]()
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("which", range(6))
    @pytest.mark.parametrize("p", [1.5, -1.0])
    def test_wrong_values(self, which: int, p: float) -> None:
        with pytest.raises(ft.FlashtileError, match="dropout"):
            self.calls(p)[which]()

    def test_weights_are_dropped_or_scaled(self) -> None:
        """With an identity matrix as v the output is the weights; backward drops the same ones."""
        q, k, v = (randn(2, 16, 3, 16, seed=i, grad=True) for i in range(3))
        eye = torch.eye(16, dtype=torch.float64)[None, :, None].expand(2, 16, 3, 16)
        torch.manual_seed(1)
        ratio = fa.flash_attn_func(q, k, eye, 0.4) / fa.flash_attn_func(q, k, eye)
        kept = ratio != 0
        assert_close(ratio[kept], torch.full_like(ratio[kept], 1 / 0.6), rtol=1e-9, atol=0)
        assert abs(kept.double().mean().item() - 0.6) < 0.06
        torch.manual_seed(1)
        out = fa.flash_attn_func(q, k, v, 0.4)
        weights = torch.einsum("bihd,bjhd->bihj", q, k).mul(0.25).softmax(-1) * kept / 0.6
        want = torch.einsum("bihj,bjhd->bihd", weights, v)
        close(out, want)
        for found, right in zip(
            torch.autograd.grad(out.square().sum(), (q, k, v)),
            torch.autograd.grad(want.square().sum(), (q, k, v)),
            strict=True,
        ):
            close(found, right)

    @pytest.mark.parametrize("sizes", [(9, 9), (3, 140), (130, 520)])
    @pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"window_size": (4, 1)}], ids=str)
    def test_returned_weights(self, sizes: tuple[int, int], options: dict[str, Any]) -> None:
        """They are the softmax, negative where dropped, rounded up to 128, and give the output."""
        Sq, Sk = sizes
        q, k, v = (randn(2, n, h, 8, seed=i, grad=True) for i, (n, h) in enumerate([(Sq, 4), (Sk, 2), (Sk, 2)]))
        torch.manual_seed(2)
        out, _, weights = fa.flash_attn_func(q, k, v, 0.3, return_attn_probs=True, **options)
        assert weights.shape == (2, 4, -(-Sq // 128) * 128, -(-Sk // 128) * 128) and weights.dtype == q.dtype
        assert not weights.requires_grad
        torch.manual_seed(2)
        assert torch.equal(fa.flash_attn_func(q, k, v, 0.3, **options), out)
        self.check_weights(weights, q, k, v, out, options)
        assert not weights[:, :, Sq:].any() and not weights[..., Sk:].any()

    def check_weights(
        self, weights: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: dict[str, Any]
    ) -> None:
        """Check that they are the softmax and, with 30% of it dropped, give the output."""
        Sq, Sk = q.shape[1], k.shape[1]
        weights = weights[:, :, :Sq, :Sk]
        eye = torch.eye(Sk, dtype=torch.float64)[None, :, None].expand(len(k), Sk, k.shape[2], Sk)
        softmax = naive_batch(q, k, eye, **options)[0].transpose(1, 2)
        assert_close(weights.abs(), softmax.detach(), rtol=1e-9, atol=1e-12)
        dropped = weights < 0
        assert abs(dropped.sum() / (softmax > 0).sum() - 0.3) < 0.15
        kept = weights.masked_fill(dropped, 0) / 0.7
        made = torch.einsum("bhij,bjhd->bihd", kept, v.repeat_interleave(2, 2))
        assert_close(made, out, rtol=1e-9, atol=1e-9)

    def test_weights_of_packed_sequences(self) -> None:
        len_q, len_k = [5, 0, 9], [7, 3, 130]
        q, k, v = (randn(n, h, 8, seed=i) for i, (n, h) in enumerate([(14, 4), (140, 2), (140, 2)]))
        two = starts(len_q), starts(len_k), 9, 130
        for options in ({}, {"causal": True}):
            out, _, weights = fa.flash_attn_varlen_func(q, k, v, *two, 0.3, return_attn_probs=True, **options)
            assert weights.shape == (3, 4, 128, 256)
            sequences = zip(q.split(len_q), k.split(len_k), v.split(len_k), out.split(len_q), weights, strict=True)
            for a, b, c, found, part in sequences:
                if len(a):
                    self.check_weights(part[None], a[None], b[None], c[None], found[None], options)
                assert not part[:, len(a) :].any() and not part[:, :, len(b) :].any()

    def test_weights_by_every_other_function(self) -> None:
        x, packed, cu = randn(2, 16, 3, 4, 8), randn(32, 3, 4, 8), starts([16, 16])
        calls = [
            lambda: fa.flash_attn_qkvpacked_func(x, 0.3, return_attn_probs=True),
            lambda: fa.flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 1:], 0.3, return_attn_probs=True),
            lambda: fa.flash_attn_varlen_qkvpacked_func(packed, cu, 16, 0.3, return_attn_probs=True),
            lambda: fa.flash_attn_varlen_kvpacked_func(
                packed[:, 0], packed[:, 1:], cu, cu, 16, 16, 0.3, return_attn_probs=True
            ),
        ]
        for call in calls:
            weights = call()[2]
            assert weights.shape == (2, 4, 128, 128) and (weights < 0).any()


def rotated(x: Tensor, place: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate one row, (heads, dim), by the angles of a position."""
    x, half = x.clone(), cos.shape[-1]
    for n in range(half):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + half)
        c, s = cos[place, n], sin[place, n]
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x


def angles(places: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    t = torch.arange(places)[:, None] * 0.3 ** torch.arange(rotary_dim // 2).double()
    return t.cos(), t.sin()


class Cache:
    """A cache with NaN in unused rows, and a check of what a call returns and writes."""

    def __init__(
        self, lengths: list[int], room: int = 12, page: int | None = None, rows: list[int] | None = None, D: int = 16
    ) -> None:
        self.lengths, self.rows, self.room = lengths, rows, room
        batch = len(lengths)
        self.k_rows = [randn(n, 2, D, seed=10 + b) for b, n in enumerate(lengths)]
        self.v_rows = [randn(n, 2, D, seed=20 + b) for b, n in enumerate(lengths)]
        self.table: Tensor | None = None
        if page is not None:
            self.k, self.v, self.table = in_pages([self.k_rows, self.v_rows], page, room)
            return
        own = list(range(batch)) if rows is None else rows
        self.k, self.v = (torch.full((max(own) + 1, room, 2, D), torch.nan, dtype=torch.float64) for _ in range(2))
        for cache, sequences in ((self.k, self.k_rows), (self.v, self.v_rows)):
            for b, x in enumerate(sequences):
                cache[own[b], : len(x)] = x

    def row(self, b: int, j: int) -> tuple[int, int]:
        """The index in the cache of row j of sequence b."""
        if self.table is not None:
            page = self.k.shape[1]
            return int(self.table[b, j // page]), j % page
        return (b if self.rows is None else self.rows[b]), j

    def check(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        interleaved: bool = True,
        leftpad: list[int] | None = None,
        lengths: Any = "tensor",
        alibi_slopes: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Call flash_attn_with_kvcache and check its output, its lse, and the cache afterwards."""
        want_k, want_v = self.k.clone(), self.v.clone()
        moving = bool(options.get("causal")) or options.get("window_size", (-1, -1)) != (-1, -1)
        outs, lses = [], []
        for b, used in enumerate(self.lengths):
            rows, keys, values = list(q[b]), list(self.k_rows[b]), list(self.v_rows[b])
            if rotary is not None:
                rows = [rotated(x, used + i * moving, *rotary, interleaved) for i, x in enumerate(rows)]
            for i in range(0 if k is None or v is None else k.shape[1]):
                assert k is not None and v is not None
                new = k[b, i] if rotary is None else rotated(k[b, i], used + i, *rotary, interleaved)
                want_k[self.row(b, used + i)], want_v[self.row(b, used + i)] = new, v[b, i]
                keys.append(new)
                values.append(v[b, i])
            first = 0 if leftpad is None else leftpad[b]
            none = q.new_zeros(0, *self.k.shape[-2:])
            seen = [torch.stack(x[first:]) if x[first:] else none for x in (keys, values)]
            row_q = torch.stack(rows) if rows else q[b]
            out, lse = naive(row_q, *seen, slopes=slopes_of(alibi_slopes, b), **options)
            outs.append(out)
            lses.append(lse)
        if lengths == "tensor":
            lengths = torch.tensor(self.lengths, dtype=torch.int32)
        call: dict[str, Any] = {
            "k": k,
            "v": v,
            "cache_seqlens": lengths,
            "cache_batch_idx": None if self.rows is None else torch.tensor(self.rows, dtype=torch.int32),
            "cache_leftpad": None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32),
            "block_table": self.table,
            "alibi_slopes": alibi_slopes,
            **options,
        }
        if rotary is not None:
            call |= {"rotary_cos": rotary[0], "rotary_sin": rotary[1], "rotary_interleaved": interleaved}
        given = q.clone(), None if k is None else k.clone()
        out, lse = fa.flash_attn_with_kvcache(q, self.k, self.v, **call, return_softmax_lse=True)
        assert out.is_contiguous() and lse.dtype == torch.float32 and lse.is_contiguous()
        close(out, torch.stack(outs))
        close(lse, torch.stack(lses))
        tolerance = 0.0 if rotary is None else 1e-12
        assert_close(self.k, want_k, rtol=0, atol=tolerance, equal_nan=True)
        assert_close(self.v, want_v, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(q, given[0]) and (k is None or torch.equal(k, given[1]))


PLACES: dict[str, dict[str, Any]] = {
    "own rows": {},
    "chosen rows": {"rows": [3, 1]},
    "pages of 1": {"page": 1},
    "pages of 3": {"page": 3},
    "pages of 16": {"page": 16},
}
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())


class TestCache:
    @every_option
    @every_place
    def test_existing_keys(self, place: dict[str, Any], options: dict[str, Any]) -> None:
        Cache([7, 4], **place).check(randn(2, 3, 4, 16), **options)

    @every_option
    @every_place
    def test_new_keys(self, place: dict[str, Any], options: dict[str, Any]) -> None:
        k, v = randn(2, 3, 2, 16, seed=1), randn(2, 3, 2, 16, seed=2)
        Cache([9, 0], **place).check(randn(2, 3, 4, 16), k, v, **options)

    @pytest.mark.parametrize("rows", [1, 2, 5])
    @pytest.mark.parametrize("new", [1, 4])
    @pytest.mark.parametrize("causal", [False, True])
    def test_more_or_fewer_queries_than_new_keys(self, rows: int, new: int, causal: bool) -> None:
        k, v = randn(2, new, 2, 16, seed=1), randn(2, new, 2, 16, seed=2)
        Cache([0, 6]).check(randn(2, rows, 4, 16), k, v, causal=causal)

    @every_place
    def test_length_that_is_an_integer(self, place: dict[str, Any]) -> None:
        k, v = randn(2, 2, 2, 16, seed=1), randn(2, 2, 2, 16, seed=2)
        Cache([5, 5], **place).check(randn(2, 2, 4, 16), k, v, lengths=5, causal=True)
        Cache([5, 5], **place).check(randn(2, 2, 4, 16), lengths=5)
        Cache([10, 10], **place).check(randn(2, 2, 4, 16), k, v, lengths=10)

    @pytest.mark.parametrize("place", [{}, {"rows": [1, 0]}, {"page": 3}])
    def test_the_whole_cache(self, place: dict[str, Any]) -> None:
        Cache([12, 12], **place).check(randn(2, 3, 4, 16), lengths=None, causal=True)

    @some_options
    @pytest.mark.parametrize("new", [0, 2])
    @every_place
    def test_padding_on_the_left(self, place: dict[str, Any], new: int, options: dict[str, Any]) -> None:
        k, v = (randn(2, new, 2, 16, seed=i) if new else None for i in (1, 2))
        Cache([8, 5], **place).check(randn(2, 2, 4, 16), k, v, leftpad=[3, 0], **options)

    def test_a_sequence_of_padding_only(self) -> None:
        Cache([0, 5]).check(randn(2, 2, 4, 16))
        Cache([4, 5]).check(randn(2, 2, 4, 16), leftpad=[4, 1])

    @every_place
    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("width", [16, 32])
    @pytest.mark.parametrize("name", ["plain", "causal", "window", "left"])
    def test_rotation(self, place: dict[str, Any], interleaved: bool, width: int, name: str) -> None:
        k, v = randn(2, 3, 2, 32, seed=1), randn(2, 3, 2, 32, seed=2)
        cache = Cache([9, 2], D=32, **place)
        cache.check(randn(2, 3, 4, 32), k, v, angles(14, width), interleaved, **OPTIONS[name])

    @every_place
    @pytest.mark.parametrize("new", [1, 3])
    @pytest.mark.parametrize("name", ["plain", "causal", "window", "slopes of each sequence"])
    def test_rotation_with_padding_on_the_left(self, place: dict[str, Any], new: int, name: str) -> None:
        """As in flash_attn, angles count rows of the cache with padding: a sequence starts at a later angle."""
        k, v = randn(2, new, 2, 16, seed=1), randn(2, new, 2, 16, seed=2)
        cache = Cache([8, 5], **place)
        cache.check(randn(2, 3, 4, 16), k, v, angles(12, 16), leftpad=[3, 0], **OPTIONS[name])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_rotation_is_rounded_once(self, dtype: torch.dtype) -> None:
        cos, sin = (x.to(dtype) for x in angles(64, 64))
        k = randn(1, 64, 2, 64, dtype=dtype)
        k_cache, v_cache = (torch.zeros(1, 64, 2, 64, dtype=dtype) for _ in range(2))
        fa.flash_attn_with_kvcache(k, k_cache, v_cache, k, k, cos, sin, 0, causal=True)
        exact = torch.stack([rotated(k[0, i].double(), i, cos.double(), sin.double(), True) for i in range(64)])
        once = exact.float().to(dtype)  # except for sums very near a tie
        assert (k_cache[0] == once).double().mean() > 0.999
        assert_close(
            (k_cache[0].double() - exact).abs().mean(), (once.double() - exact).abs().mean(), rtol=1e-3, atol=0
        )

    def test_rotation_when_the_length_is_an_integer(self) -> None:
        k, v = randn(2, 3, 2, 16, seed=1), randn(2, 3, 2, 16, seed=2)
        Cache([4, 4]).check(randn(2, 3, 4, 16), k, v, angles(12, 16), lengths=4, causal=True)

    def test_rotation_keeps_the_dtype(self) -> None:
        cos, sin = (x.bfloat16() for x in angles(12, 16))
        q, k, v = (randn(1, 2, 2, 16, seed=i, dtype=torch.bfloat16) for i in range(3))
        k_cache, v_cache = (torch.zeros(1, 12, 2, 16, dtype=torch.bfloat16) for _ in range(2))
        out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, 3, causal=True)
        assert out.dtype == torch.bfloat16
        for i in range(2):
            wanted = rotated(k[0, i].double(), 3 + i, cos.double(), sin.double(), True)
            assert_close(k_cache[0, 3 + i].double(), wanted, rtol=2**-6, atol=2**-6)
        assert torch.equal(v_cache[0, 3:5], v[0])

    def test_one_token_after_the_other(self) -> None:
        """Decoding with a cache gives the rows of causal attention over the whole sequence."""
        q, k, v = (randn(2, 8, h, 16, seed=h + i) for i, h in enumerate((4, 2, 2)))
        k_cache, v_cache = torch.full((2, 8, 2, 16), torch.nan).double(), torch.full((2, 8, 2, 16), torch.nan).double()
        rows = [
            fa.flash_attn_with_kvcache(
                *(q[:, i : i + 1], k_cache, v_cache, k[:, i : i + 1], v[:, i : i + 1]), cache_seqlens=i, causal=True
            )
            for i in range(8)
        ]
        close(torch.cat(rows, 1), naive_batch(q, k, v, causal=True)[0])
        assert torch.equal(k_cache, k) and torch.equal(v_cache, v)

    @every_place
    def test_unused_entries_of_the_table(self, place: dict[str, Any]) -> None:
        """As in flash_attn, unused entries may hold anything."""
        cache = Cache([2, 4], **place)
        if cache.table is not None:
            used = torch.tensor([[-(-n // cache.k.shape[1])] for n in (5, 7)])
            cache.table[torch.arange(cache.table.shape[1]) >= used] = -(2**31)
        cache.check(randn(2, 2, 4, 16), *(randn(2, 3, 2, 16, seed=i) for i in (1, 2)), causal=True)

    def test_no_gradients(self) -> None:
        """As in flash_attn; otherwise the cache would keep the graph of everything written to it."""
        q, k, v = (randn(2, 3, 2, 16, seed=i).requires_grad_() for i in range(3))
        k_cache, v_cache = torch.zeros(2, 8, 2, 16).double(), torch.zeros(2, 8, 2, 16).double()
        out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0)
        assert not (out.requires_grad or k_cache.requires_grad or v_cache.requires_grad)

    def test_one_graph(self) -> None:
        def step(q: Tensor, cache: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
            cos, sin = angles(8, 16)
            rotary: Any = {"rotary_cos": cos, "rotary_sin": sin, "cache_leftpad": lengths // 2}
            return fa.flash_attn_with_kvcache(q, cache, cache, k, k, cache_seqlens=lengths, causal=True, **rotary)

        torch._dynamo.reset()
        q, k, lengths = randn(2, 1, 4, 16), randn(2, 1, 2, 16), torch.tensor([2, 4], dtype=torch.int32)
        caches = [torch.zeros(2, 8, 2, 16).double() for _ in range(2)]
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for n in range(3):
            close(compiled(q, caches[0], k, lengths + n), step(q, caches[1], k, lengths + n))
        close(*caches)

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("paged", [False, True])
    def test_exported_with_any_number_of_sequences(self, paged: bool, strict: bool) -> None:
        class Layer(torch.nn.Module):
            def forward(self, q: Tensor, cache: Tensor, k: Tensor, lengths: Tensor, table: Tensor | None) -> Tensor:
                k_cache, v_cache = cache.clone(), cache.clone()
                options: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table, "causal": True}
                return fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, k + 1, **options) + k_cache.sum()

        def given(batch: int, rows: int) -> tuple[Tensor | None, ...]:
            lengths = torch.arange(batch, dtype=torch.int32)
            table = torch.randperm(2 * batch, dtype=torch.int32).reshape(batch, 2) if paged else None
            cache = randn(*((2 * batch, 4) if paged else (batch, 8)), 2, 16)
            return randn(batch, rows, 4, 16), cache, randn(batch, rows, 2, 16), lengths, table

        auto = torch.export.Dim.AUTO
        shapes = ({0: auto, 1: auto}, {0: auto}, {0: auto, 1: auto}, {0: auto}, {0: auto} if paged else None)
        program = torch.export.export(Layer(), given(2, 3), dynamic_shapes=shapes, strict=strict)
        for some in (given(2, 3), given(3, 2)):
            close(program.module()(*some), Layer()(*some))

    def test_number_of_splits_has_no_effect(self) -> None:
        q, k, v = (randn(2, 9, 2, 8, seed=i) for i in range(3))
        outs = [fa.flash_attn_with_kvcache(q, k, v, num_splits=n) for n in (0, 1, 4)]
        assert isinstance(outs[0], Tensor) and all(torch.equal(x, outs[0]) for x in outs)

    def test_cache_of_any_strides(self) -> None:
        cache = torch.zeros(2, 2, 2, 12, 16, dtype=torch.float64)  # one allocation for both, heads before rows
        k_cache, v_cache = cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)
        assert not k_cache.is_contiguous()
        q, k, v = (randn(2, 3, 2, 16, seed=i) for i in range(3))
        out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True)
        close(out, naive_batch(q, k, v, causal=True)[0])
        assert torch.equal(k_cache[:, :3], k) and torch.equal(v_cache[:, :3], v)

    @given(data=st.data())
    def test_any_call(self, data: st.DataObject) -> None:
        draw = data.draw
        batch, rows, new = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 4))
        lengths = draw(st.lists(st.integers(0, 8), min_size=batch, max_size=batch))
        kind = draw(st.sampled_from(["own", "rows", "pages"]))
        place: dict[str, Any] = {}
        if kind == "rows":
            place["rows"] = draw(st.permutations(range(4)))[:batch]
        if kind == "pages":
            place["page"] = draw(st.integers(1, 7))
        k, v = (randn(batch, new, 2, 16, seed=i) if new else None for i in (1, 2))
        extra: dict[str, Any] = draw(any_options(batch, 4))
        if draw(st.booleans()) and new:
            extra |= {"rotary": angles(12, 16), "interleaved": draw(st.booleans())}
        if draw(st.booleans()):
            extra["leftpad"] = [draw(st.integers(0, n)) for n in lengths]
        Cache(lengths, **place).check(randn(batch, rows, 4, 16), k, v, **extra)


class TestErrors:
    def test_they_are_runtime_errors_too(self) -> None:
        """Like those of flash_attn, which callers may catch."""
        x = randn(2, 5, 3, 4, 8)
        q, k, v = x.unbind(2)
        for call in (
            lambda: fa.flash_attn_func(q, k.float(), v),
            lambda: fa.flash_attn_qkvpacked_func(x[:, :, :2]),
            lambda: fa.flash_attn_kvpacked_func(q, x),
            lambda: fa.flash_attn_varlen_func(q[0], k[0], v[0], starts([5]), starts([4]), 5, 4),
            lambda: fa.flash_attn_varlen_qkvpacked_func(x[0], starts([4]), 5),
            lambda: fa.flash_attn_varlen_kvpacked_func(q[0], x[0, :, 1:], starts([5]), starts([4]), 5, 5),
            lambda: fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=6),
        ):
            with pytest.raises(RuntimeError, match="expected") as caught:
                call()
            assert isinstance(caught.value, ft.ShapeError | ft.DTypeError)

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("softcap", {"softcap": -1.0}),
            ("window_size", {"window_size": (1,)}),
            ("window_size", {"window_size": (1, 2, 3)}),
            ("alibi", {"alibi_slopes": torch.ones(3)}),
            ("alibi", {"alibi_slopes": torch.ones(3, 4)}),
            ("dropout_p", {"dropout_p": 2.0}),
            ("softmax_scale", {"softmax_scale": float("nan")}),
            ("window_size", {"window_size": 3}),
            ("window_size", {"window_size": (None, 0)}),
            ("window_size", {"window_size": (1.5, 0)}),
            ("alibi_slopes", {"alibi_slopes": torch.ones(5)}),
            ("return_attn_probs", {"return_attn_probs": 1}),
        ],
    )
    def test_options(self, name: str, wrong: dict[str, Any]) -> None:
        x = randn(2, 5, 3, 4, 8)
        with pytest.raises(ft.FlashtileError, match=name):
            fa.flash_attn_func(*x.unbind(2), **wrong)
        with pytest.raises(ft.FlashtileError, match=name):
            fa.flash_attn_varlen_qkvpacked_func(x.flatten(0, 1), starts([5, 5]), 5, **wrong)

    @pytest.mark.parametrize(
        ("name", "shapes"),
        [
            ("q", [(5, 4, 8), (2, 5, 4, 8), (2, 5, 4, 8)]),
            ("k", [(2, 5, 4, 8), (5, 4, 8), (2, 5, 4, 8)]),
            ("v", [(2, 5, 4, 8), (2, 5, 4, 8), (5, 4, 8)]),
            ("k", [(2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 3, 8)]),
            ("k", [(2, 5, 4, 8), (2, 5, 4, 6), (2, 5, 4, 8)]),
            ("k", [(2, 5, 4, 8), (1, 5, 4, 8), (1, 5, 4, 8)]),
            ("v", [(2, 5, 4, 8), (2, 5, 4, 8), (2, 6, 4, 8)]),
        ],
    )
    def test_shapes(self, name: str, shapes: list[tuple[int, ...]]) -> None:
        with pytest.raises(ft.ShapeError, match=rf"\b{name}\b"):
            fa.flash_attn_func(*(torch.zeros(shape) for shape in shapes))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_tensors_that_do_not_store_their_values(self) -> None:
        """The error names the argument, even where torch refuses to transpose it."""
        x, q = randn(2, 5, 2, 4, 8), randn(2, 5, 4, 8)
        freed = x.clone()
        freed.untyped_storage().resize_(0)
        nested = torch.nested.nested_tensor([*x.unbind()])
        for wrong, error in ((freed, "a storage of at least"), (nested, "a dense tensor")):
            with pytest.raises(ft.FlashtileError, match=f"^kv: expected {error}") as caught:
                fa.flash_attn_kvpacked_func(q, wrong)
            assert isinstance(caught.value, RuntimeError)

    @pytest.mark.parametrize("shape", [(2, 5, 2, 4, 8), (5, 3, 4, 8), (2, 5, 12, 8)])
    def test_qkv(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ft.ShapeError, match="qkv"):
            fa.flash_attn_qkvpacked_func(torch.zeros(shape))

    @pytest.mark.parametrize("shape", [(2, 5, 3, 4, 8), (5, 2, 4, 8), (2, 5, 8, 8)])
    def test_kv(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ft.ShapeError, match=r"\bkv\b"):
            fa.flash_attn_kvpacked_func(torch.zeros(2, 5, 4, 8), torch.zeros(shape))

    @pytest.mark.parametrize("shape", [(10, 2, 4, 8), (2, 5, 3, 4, 8)])
    def test_packed_qkv(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ft.ShapeError, match="qkv"):
            fa.flash_attn_varlen_qkvpacked_func(torch.zeros(shape), starts([5, 5]), 5)

    @pytest.mark.parametrize("shape", [(10, 3, 4, 8), (2, 5, 2, 4, 8)])
    def test_packed_kv(self, shape: tuple[int, ...]) -> None:
        two = starts([5, 5]), starts([5, 5]), 5, 5
        with pytest.raises(ft.ShapeError, match=r"\bkv\b"):
            fa.flash_attn_varlen_kvpacked_func(torch.zeros(10, 4, 8), torch.zeros(shape), *two)

    @pytest.mark.parametrize(
        ("q", "k"),
        [([5, 4], [5, 5]), ([5, 5], [5, 6]), ([5, 5], [5, 3, 2]), ([11, -1], [5, 5]), ([5, 5], [-1, 11])],
    )
    def test_starts_that_do_not_fit(self, q: list[int], k: list[int]) -> None:
        x = torch.zeros(10, 2, 8)
        with pytest.raises(ft.ShapeError, match="cu_"):
            fa.flash_attn_varlen_func(x, x, x, starts(q), starts(k), 5, 5)

    @pytest.mark.parametrize("shape", [(2, 5, 8), (2, 1, 5, 2, 8)])
    def test_packed_rank(self, shape: tuple[int, ...]) -> None:
        x = torch.zeros(10, 2, 8)
        with pytest.raises(ft.FlashtileError, match=r"\bq\b"):
            fa.flash_attn_varlen_func(torch.zeros(shape), x, x, starts([5, 5]), starts([5, 5]), 5, 5)

    @pytest.mark.parametrize("table", [torch.zeros(2, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int32)])
    def test_block_table(self, table: Tensor) -> None:
        pages, q = torch.zeros(4, 3, 2, 8), torch.zeros(10, 2, 8)
        with pytest.raises(ft.ShapeError, match="block_table"):
            fa.flash_attn_varlen_func(q, pages, pages, starts([5, 5]), starts([5, 5]), 5, 5, block_table=table)

    @pytest.mark.parametrize("wrong", [-1, 4, 99])
    def test_pages_that_do_not_exist(self, wrong: int) -> None:
        pages, q = torch.zeros(4, 3, 2, 8), torch.zeros(10, 2, 8)
        table = torch.tensor([[0, wrong], [1, 2]], dtype=torch.int32)
        with pytest.raises(ft.ShapeError, match=r"^block_table: expected numbers from 0 to 3"):
            fa.flash_attn_varlen_func(q, pages, pages, starts([5, 5]), starts([5, 5]), 5, 5, block_table=table)

    @pytest.mark.parametrize("name", ["k", "v", "block_table", "out", "seqused_k"])
    def test_memory_that_was_freed(self, name: str) -> None:
        given: dict[str, Any] = {
            "k": torch.zeros(4, 3, 2, 8),
            "v": torch.zeros(4, 3, 2, 8),
            "block_table": torch.tensor([[0, 3], [1, 2]], dtype=torch.int32),
            "out": torch.zeros(10, 2, 8),
            "seqused_k": torch.tensor([5, 5], dtype=torch.int32),
        }
        given[name].untyped_storage().resize_(4)
        with pytest.raises(ft.ShapeError, match=f"^{name}: expected a storage of at least"):
            fa.flash_attn_varlen_func(
                torch.zeros(10, 2, 8), given.pop("k"), given.pop("v"), starts([5, 5]), None, 5, 5, **given
            )

    def test_sequence_longer_than_its_pages(self) -> None:
        pages, q = torch.zeros(4, 3, 2, 8), torch.zeros(10, 2, 8)
        table = torch.zeros(2, 2, dtype=torch.int32)
        with pytest.raises(ft.ShapeError):
            fa.flash_attn_varlen_func(q, pages, pages, starts([5, 5]), starts([5, 7]), 5, 7, block_table=table)


class TestErrorsOfTheCache:
    """A refused call writes nothing."""

    def refused(self, kind: type[Exception], name: str, **options: Any) -> None:
        k_cache, v_cache = (
            options.pop(name, randn(3, 8, 2, 16, seed=i)) for i, name in ((3, "k_cache"), (4, "v_cache"))
        )
        before = k_cache.clone(), v_cache.clone()
        q = options.pop("q", randn(2, 3, 4, 16))
        with pytest.raises(kind, match=name):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache, **options)
        assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])

    new: dict[str, Any]

    @pytest.fixture(autouse=True)
    def new_rows(self) -> None:
        self.new = {"k": randn(2, 3, 2, 16, seed=1), "v": randn(2, 3, 2, 16, seed=2)}

    @pytest.mark.parametrize("lengths", [6, 8, 100, -1, torch.tensor([2, 6]).int(), torch.tensor([-1, 2]).int()])
    @pytest.mark.parametrize("pages", [False, True])
    def test_not_enough_rows(self, lengths: Any, pages: bool) -> None:
        table = {"block_table": torch.tensor([[0], [2]]).int()} if pages else {}
        self.refused(ft.ShapeError, "cache_seqlens", cache_seqlens=lengths, **self.new, **table)

    @pytest.mark.parametrize("lengths", [9, torch.tensor([2, 9]).int(), torch.tensor([2, -1]).int()])
    def test_longer_than_the_cache(self, lengths: Any) -> None:
        self.refused(ft.ShapeError, "cache_seqlens", cache_seqlens=lengths)

    def test_new_keys_without_lengths(self) -> None:
        self.refused(ft.ShapeError, "cache_seqlens", **self.new)

    @pytest.mark.parametrize("lengths", [torch.tensor([2]).int(), torch.tensor([2, 2, 2]).int(), torch.tensor(2).int()])
    def test_lengths_of_another_batch(self, lengths: Tensor) -> None:
        self.refused(ft.ShapeError, "cache_seqlens", cache_seqlens=lengths, **self.new)

    @pytest.mark.parametrize("alone", ["k", "v"])
    def test_keys_without_values(self, alone: str) -> None:
        self.refused(ft.FlashtileError, r"\b[kv]\b", cache_seqlens=2, **{alone: self.new[alone]})

    @pytest.mark.parametrize(("given", "other"), [("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")])
    def test_half_a_rotation(self, given: str, other: str) -> None:
        self.refused(ft.FlashtileError, other, cache_seqlens=2, **{given: angles(8, 16)[0]}, **self.new)

    def test_angles_that_end_too_early(self) -> None:
        cos, sin = angles(4, 16)
        self.refused(ft.ShapeError, "rotary", cache_seqlens=2, rotary_cos=cos, rotary_sin=sin, **self.new)

    def test_angles_wider_than_the_rows(self) -> None:
        cos, sin = angles(8, 32)
        self.refused(ft.ShapeError, "rotary", cache_seqlens=2, rotary_cos=cos, rotary_sin=sin, **self.new)

    def test_angles_of_two_shapes(self) -> None:
        cos, _ = angles(8, 16)
        self.refused(ft.ShapeError, "rotary", cache_seqlens=2, rotary_cos=cos, rotary_sin=cos[:, :4], **self.new)

    @pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0, 3], [-1, 0]])
    def test_rows_that_do_not_exist(self, rows: list[int]) -> None:
        chosen = torch.tensor(rows, dtype=torch.int32)
        self.refused(ft.ShapeError, "cache_batch_idx", cache_seqlens=2, cache_batch_idx=chosen, **self.new)

    @pytest.mark.parametrize("padding", [[0], [0, 1, 2]])
    def test_padding_of_another_batch(self, padding: list[int]) -> None:
        given = torch.tensor(padding, dtype=torch.int32)
        self.refused(ft.ShapeError, "cache_leftpad", cache_seqlens=2, cache_leftpad=given, **self.new)

    @pytest.mark.parametrize("table", [[0, 1], [[0, 1]], [[0, 1], [2, 0], [1, 2]]])
    def test_table_of_another_batch(self, table: Any) -> None:
        given = torch.tensor(table, dtype=torch.int32)
        self.refused(ft.ShapeError, "block_table", cache_seqlens=2, block_table=given, **self.new)

    def test_cache_of_too_few_sequences(self) -> None:
        self.refused(ft.ShapeError, "cache", k_cache=randn(1, 8, 2, 16), v_cache=randn(1, 8, 2, 16), cache_seqlens=2)

    @pytest.mark.parametrize("lengths", [2.5, [2, 3], torch.tensor([2.0, 3.0]), torch.tensor([True, False])])
    def test_lengths_that_are_not_integers(self, lengths: Any) -> None:
        self.refused(ft.DTypeError, "cache_seqlens", cache_seqlens=lengths, **self.new)

    @pytest.mark.parametrize("name", ["cache_batch_idx", "cache_leftpad"])
    @pytest.mark.parametrize("numbers", [torch.tensor([1.0, 0.5]), torch.tensor([True, False])])
    def test_indices_that_are_not_integers(self, name: str, numbers: Tensor) -> None:
        self.refused(ft.DTypeError, name, cache_seqlens=2, **{name: numbers}, **self.new)

    @pytest.mark.parametrize("padding", [[-1, 0], [0, 9]])
    def test_padding_beyond_the_cache(self, padding: list[int]) -> None:
        given = torch.tensor(padding, dtype=torch.int32)
        self.refused(ft.ShapeError, "cache_leftpad", cache_seqlens=2, cache_leftpad=given, **self.new)

    @pytest.mark.parametrize("wrong", [-1, 3, 99])
    @pytest.mark.parametrize("new", [False, True])
    def test_pages_that_do_not_exist(self, wrong: int, new: bool) -> None:
        table = torch.tensor([[0, wrong], [1, 2]], dtype=torch.int32)
        used, more = (8, self.new) if new else (9, {})
        self.refused(ft.ShapeError, "block_table", cache_seqlens=used, block_table=table, **more)

    @pytest.mark.parametrize("name", ["k", "v", "cache_batch_idx", "cache_seqlens"])
    def test_tensors_on_another_device(self, name: str) -> None:
        """Values on the meta device would silently be lost."""
        numbers = torch.tensor([1, 2], dtype=torch.int32)
        given = {**self.new, "cache_batch_idx": numbers, "cache_seqlens": numbers}
        self.refused(ft.DTypeError, name, **given | {name: given[name].to("meta")})

    def test_fewer_values_than_keys(self) -> None:
        for shape in ((2, 8, 2, 16), (3, 7, 2, 16), (3, 8, 1, 16)):
            self.refused(ft.ShapeError, "v_cache", v_cache=randn(*shape), cache_seqlens=2, **self.new)

    def test_a_table_that_is_not_of_integers(self) -> None:
        self.refused(ft.DTypeError, "block_table", cache_seqlens=2, block_table=torch.tensor([[0.0], [2.0]]))

    def test_a_cache_that_overlaps_itself(self) -> None:
        x = randn(1, 8, 2, 16).expand(3, -1, -1, -1)
        self.refused(ft.ShapeError, "k_cache", k_cache=x, cache_seqlens=2, **self.new)
        self.refused(ft.ShapeError, "v_cache", v_cache=x, cache_seqlens=2, **self.new)

    @pytest.mark.parametrize(
        "name", ["q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "rotary_cos", "alibi_slopes"]
    )
    def test_memory_that_was_freed(self, name: str) -> None:
        cos, sin = angles(8, 16)
        given: dict[str, Any] = {
            "q": randn(2, 3, 4, 16),
            "k_cache": randn(2, 8, 2, 16),
            "v_cache": randn(2, 8, 2, 16),
            "cache_seqlens": torch.tensor([2, 3], dtype=torch.int32),
            "rotary_cos": cos,
            "rotary_sin": sin,
            "alibi_slopes": torch.ones(2, 4),
            **self.new,
        }
        given[name].untyped_storage().resize_(8 if name != "cache_seqlens" else 4)
        with pytest.raises(ft.ShapeError, match=f"^{name}: expected a storage of at least"):
            fa.flash_attn_with_kvcache(**given)

    @pytest.mark.parametrize("name", ["k", "v"])
    @pytest.mark.parametrize("shape", [(1, 3, 2, 16), (2, 2, 2, 16), (2, 3, 1, 16), (2, 3, 2, 8), (2, 3, 32)])
    def test_new_rows_of_another_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self.refused(ft.ShapeError, r"\b[kv]\b", cache_seqlens=2, **(self.new | {name: torch.zeros(shape).double()}))

    @pytest.mark.parametrize("name", ["k", "v"])
    def test_new_rows_of_another_dtype(self, name: str) -> None:
        self.refused(ft.DTypeError, rf"\b{name}\b", cache_seqlens=2, **(self.new | {name: self.new[name].float()}))

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("softcap", {"softcap": -1.0}),
            ("window_size", {"window_size": (1,)}),
            ("alibi", {"alibi_slopes": torch.ones(3)}),
            ("q", {"q": torch.zeros(2, 3, 3, 16).double()}),
            ("q", {"q": torch.zeros(2, 3, 4, 8).double()}),
        ],
    )
    def test_options(self, name: str, wrong: dict[str, Any]) -> None:
        self.refused(ft.FlashtileError, name, cache_seqlens=2, **self.new, **wrong)

    @needs_native
    def test_a_cached_call_is_not_described_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And a wrong call after it writes nothing either."""
        described: list[Any] = []
        describe = fa.describe
        monkeypatch.setattr(fa, "describe", lambda *args, **more: described.append(args) or describe(*args, **more))
        given: dict[str, Any] = {"q": randn(2, 3, 4, 16), "cache_seqlens": 2, **self.new}
        for count in (1, 1, 1):
            fa.flash_attn_with_kvcache(k_cache=randn(2, 8, 2, 16), v_cache=randn(2, 8, 2, 16), **given)
            assert len(described) == count
        cache = randn(2, 8, 2, 16)
        before = cache.clone()
        for wrong in ({"softcap": -1.0}, {"q": torch.zeros(2, 3, 3, 16).double()}):
            with pytest.raises(ft.FlashtileError):
                fa.flash_attn_with_kvcache(k_cache=cache, v_cache=cache.clone(), **given | wrong)
        assert torch.equal(cache, before)
