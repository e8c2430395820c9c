"""gpu/peers.py: every library computes the same results as flashtile, forward and backward, through its own API."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._functorch import config  # noqa: E402

from flashtile.backends import gluon  # noqa: E402
from flashtile.lab.bench.gpu import peers  # noqa: E402
from flashtile.lab.bench.gpu.bench import difference  # noqa: E402
from flashtile.lab.bench.gpu.peers import CUDNN, FA2, FA3, FA4, FLEX, ORDERED, OURS, PEERS, PORTABLE, SDPA_FLASH, WIDE  # noqa: E402
from flashtile.lab.bench.gpu.rows import Row  # noqa: E402
from tests.lab.bench.gpu.fakes import one_thread, row_of  # noqa: E402

# Uncompiled FlexAttention warns that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def small(row: Row) -> Row:
    """Large enough for every mask to hide something, in float32 for strict comparisons."""
    case = replace(row.case, n_q=min(row.case.n_q, 24), n_k=24, dim=16, batch=2, dtype="float32")
    case = replace(case, heads=4, kv_heads=2 if row.case.heads != row.case.kv_heads else 4)
    if row.window is not None:
        case = replace(case, options={"causal": True, "window": (4, None)})
    if row.lengths:
        return Row(row.suite, replace(case, batch=1, n_q=24, n_k=24), (5, 12, 7))
    return replace(row, case=case)


KINDS = ("D64 full", "D64 causal", "H32/8 causal", "window1024", "packed8")
ROWS = [row_of(f"train {direction} {kind}", small) for direction in ("forward", "backward") for kind in KINDS]
ROWS += [row_of("train step", small), row_of("decode B16", small)]


def dense(q: Any, k: Any, v: Any, causal: bool, window: tuple[Any, Any]) -> Any:
    """Attention on (batch, n, heads, dim) in plain torch, aligned at the end as in flash_attn."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    place = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2])[None, :] - place
    seen = torch.ones_like(distance, dtype=torch.bool)
    left, right = window
    if causal:
        seen &= distance <= 0
    if left is not None and left >= 0:
        seen &= (distance >= -left) & (distance <= right)
    S = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (S.softmax(-1) @ v).transpose(1, 2)


class Library(ModuleType):
    """Fake flash_attn functions; `no_limit` is that generation's value for an open side of a window."""

    def __init__(self, no_limit: int | None, *without: str) -> None:
        super().__init__("flash_attn")
        self.no_limit = no_limit
        self.called: list[str] = []
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
            if name not in without:
                setattr(self, name, getattr(self, "_" + name))

    def _dense(self, name: str, *args: Any) -> Any:
        self.called.append(name)
        assert args[-1][0] is self.no_limit or args[-1][0] == self.no_limit or args[-1][1] == 0
        return dense(*args)

    def _flash_attn_func(self, q: Any, k: Any, v: Any, causal: bool, window_size: Any, num_splits: int = 1) -> Any:
        return self._dense(f"whole {num_splits}", q, k, v, causal, window_size)

    def _flash_attn_with_kvcache(self, q: Any, k_cache: Any, v_cache: Any, causal: bool, window_size: Any) -> Any:
        return self._dense("cache", q, k_cache, v_cache, causal, window_size)

    def _flash_attn_varlen_func(self, q: Any, k: Any, v: Any, **o: Any) -> Any:
        starts_q, starts_k = o["cu_seqlens_q"].tolist(), o["cu_seqlens_k"].tolist()
        assert o["cu_seqlens_q"].dtype is torch.int32
        lengths = [b - a for a, b in pairwise(starts_q)]
        assert o["max_seqlen_q"] == max(lengths) and starts_q[-1] == q.shape[0]
        parts = []
        for n in range(len(lengths)):
            mine, theirs = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
            given = (q[None, mine], k[None, theirs], v[None, theirs])
            parts.append(self._dense("packed", *given, o["causal"], o["window_size"])[0])
        return torch.cat(parts), "an lse"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """All three generations of flash_attn, SDPA with its math kernel, and FlexAttention itself."""
    found = SimpleNamespace(
        fa2=Library(-1), fa3=Library(-1, "flash_attn_func"), fa4=Library(None, "flash_attn_with_kvcache")
    )
    monkeypatch.setitem(sys.modules, "flash_attn", found.fa2)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", found.fa3)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", found.fa4)
    monkeypatch.setattr(peers, "SDPA_BACKENDS", {CUDNN: "MATH", SDPA_FLASH: "MATH"})
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # refuses gradients
    peers._not_importable.cache_clear()
    with config.patch(donated_buffer=True), one_thread():
        yield found
    peers._not_importable.cache_clear()


ON_CPU = [peer for peer in PEERS if peer.name not in (PORTABLE, ORDERED)]
IN_16_BITS = [peer for peer in ON_CPU if peer.name != WIDE]


def results(row: Row) -> tuple[dict[str, Any], dict[str, str]]:
    sets = [peers.tensors(row, "cpu", seed) for seed in (0, 1)]
    found, unfit = {}, {}
    for peer in ON_CPU:
        try:
            found[peer.name] = peer.prepare(row, sets).result()
        except peers.UnfitError as error:
            unfit[peer.name] = str(error)
    return found, unfit


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_all_peers_agree(libraries: SimpleNamespace, row: Row) -> None:
    found, unfit = results(row)
    assert set(unfit) == {WIDE, *((CUDNN, SDPA_FLASH) if row.lengths or row.window else ())}
    assert set(found) | set(unfit) == {OURS, WIDE, CUDNN, SDPA_FLASH, FLEX, FA2, FA3, FA4}
    shape = (row.case.batch, row.case.heads, row.case.n_q, row.case.dim)
    for name, result in found.items():
        assert result[0].shape == shape, name
        assert len(result) == (3 if row.supports_backward else 1)
        assert difference(result, found[OURS]) < 1e-5, name


def test_the_right_function_is_called(libraries: SimpleNamespace) -> None:
    for words, fa2, fa3, fa4 in (
        ("train forward D64 causal", "whole 1", "packed", "whole 1"),
        ("train forward packed8", "packed", "packed", "packed"),
        ("decode B16", "cache", "cache", "whole 0"),
    ):
        results(row_of(words, small))
        assert [x.called[-1] for x in (libraries.fa2, libraries.fa3, libraries.fa4)] == [fa2, fa3, fa4], words


def test_sets_of_inputs_share_nothing(libraries: SimpleNamespace) -> None:
    row = row_of("decode B16", small)
    sets = [peers.tensors(row, "cpu", seed) for seed in (0, 1)]
    for peer in IN_16_BITS:
        contender = peer.prepare(row, sets)
        with contender.context():
            first, second, again = contender.calls[0](), contender.calls[1](), contender.calls[0]()
        assert torch.equal(first, again) and not torch.equal(first, second), peer.name


def test_a_backward_row_runs_only_the_backward_pass(libraries: SimpleNamespace) -> None:
    row = row_of("train backward D64 full", small)
    (contender,) = [p.prepare(row, [peers.tensors(row, "cpu", 0)]) for p in PEERS if p.name == FA2]
    before = len(libraries.fa2.called)
    contender.repeated(3)()
    assert len(libraries.fa2.called) == before


def test_a_step_runs_both_passes_every_time(libraries: SimpleNamespace) -> None:
    step, backward = (row_of(f"train {direction} D128 causal", small) for direction in ("step", "backward"))
    given = [peers.tensors(step, "cpu", 0)]
    for peer in IN_16_BITS:
        first, second = peer.prepare(step, given), peer.prepare(backward, given)
        assert difference(first.result(), second.result()) == 0, peer.name
    (contender,) = [p.prepare(step, given) for p in PEERS if p.name == FA2]
    before = len(libraries.fa2.called)
    contender.repeated(3)()
    assert len(libraries.fa2.called) == before + 3


def eight(row: Row) -> Row:
    """Small, with 8-bit tensors and grouped heads."""
    return replace(row, case=replace(small(row).case, kv_heads=2, dtype="float8_e4m3fn"))


class EightBits(Library):
    """A fake flash_attn that takes factors."""

    def _flash_attn_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool,
        window_size: Any,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
    ) -> Any:
        factors = (q_descale, k_descale, v_descale)
        assert all(x.shape == (2, 2) and x.dtype is torch.float32 and (x == 1).all() for x in factors)
        assert q.dtype is k.dtype is v.dtype is torch.float8_e4m3fn
        return self._dense("whole", *(x.float() for x in (q, k, v)), causal, window_size).bfloat16()


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_8_bits(libraries: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", EightBits(-1))
    row = row_of(f"train float8_e4m3fn D64 {mask}", eight)
    found, unfit = results(row)
    assert unfit == dict.fromkeys((CUDNN, SDPA_FLASH, FLEX, FA2, FA4), "it takes no 8-bit tensors")
    assert set(found) == {OURS, WIDE, FA3}
    for name, (result,) in found.items():
        assert result.shape == (2, 4, 24, 16) and result.dtype is torch.bfloat16, name
        assert difference((result,), found[OURS]) < 0.01, name  # on a CPU weights keep their bits
    given = peers.tensors(row, "cpu", 0)
    assert {x.dtype for x in given[:3]} == {torch.float8_e4m3fn} and given.dout is None
    with pytest.raises(peers.UnfitError, match="it takes no 8-bit tensors"):
        next(peer for peer in PEERS if peer.name == PORTABLE).build(row, given)


def test_8_bits_and_the_same_numbers_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours gets factors with 8-bit tensors, and none with the same numbers in bfloat16."""
    called: list[Any] = []
    monkeypatch.setattr(peers.flashtile, "attention", lambda *given, **options: called.append((given, options)))
    row = row_of("train float8_e4m3fn D64 causal", eight)
    given = peers.tensors(row, "cpu", 0)
    for peer in PEERS:
        if peer.name in (OURS, WIDE):
            peer.prepare(row, [given]).calls[0]()
    ((narrow, with_factors), (wide, without)) = called
    assert [x.dtype for x in narrow] == [torch.float8_e4m3fn] * 3
    assert [x.dtype for x in wide] == [torch.bfloat16] * 3
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(narrow, wide, strict=True))
    assert len(with_factors["descale"]) == 3 and "descale" not in without and without["causal"] is True


@pytest.mark.parametrize(
    ("name", "fits", "asked", "others", "reason"),
    [
        (PORTABLE, "train forward D64 causal", {"backend": "triton"}, ["decode B16"], "flashtile runs the same here"),
        (
            ORDERED,
            "train backward D64 causal",
            {"deterministic": True},
            ["train forward D64 causal", "train forward window1024"],
            "it is for gradients",
        ),
    ],
    ids=["portable", "deterministic"],
)
def test_our_own_variants(
    monkeypatch: pytest.MonkeyPatch, name: str, fits: str, asked: dict[str, Any], others: list[str], reason: str
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(peers.flashtile, "attention", lambda *_, **options: called.append(options))
    (peer,) = [peer for peer in PEERS if peer.name == name]
    row = row_of(fits, small)
    peer.build(row, peers.tensors(row, "cpu", 0))[1](None, None, None)
    assert [{key: options[key] for key in asked} for options in called] == [asked]
    for other in others:
        with pytest.raises(peers.UnfitError, match=reason):
            peer.build(row_of(other, small), peers.tensors(row, "cpu", 0))


def test_missing_libraries_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    peers._not_importable.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # all that FlashAttention-4 leaves of it
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", Library(None))
    here, absent = peers.available()
    assert absent[PORTABLE] == absent[ORDERED] == gluon.missing()
    assert absent[FA2] == "flash_attn has no attention function"
    assert absent[FA3].startswith("flash_attn_interface cannot be imported: ModuleNotFoundError")
    assert [peer.name for peer in here] == [OURS, WIDE, CUDNN, SDPA_FLASH, FLEX, FA4]
    here, absent = peers.available([FLEX])
    assert [peer.name for peer in here] == [OURS, FLEX] and not absent
    peers._not_importable.cache_clear()


def test_errors_are_shortened_to_one_line() -> None:
    assert peers.short_error(ValueError("\nfirst\nsecond")) == "ValueError: first"
    assert len(peers.short_error(ValueError("x" * 1000))) == 200
