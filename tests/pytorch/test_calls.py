"""Cached GPU calls are found by shapes and options; here Triton's interpreter replaces the GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile import dispatch

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flashtile.backends.gpu.kernel_launch import LaunchSequence  # noqa: E402
from flashtile.backends.triton import tuning  # noqa: E402
from flashtile.pytorch import calls as cache  # noqa: E402
from flashtile.pytorch import interception, operands  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on the GPU"),
]
OPTIONS = {"causal": False, "window": None, "bias": None, "dropout": 0.0, "seed": 0, "softcap": 0.0}


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in dispatch.TABLE if row.name == "triton")
    monkeypatch.setattr(cache, "dispatch", SimpleNamespace(choose=lambda *_: row))
    monkeypatch.setattr(cache, "on_cpu", SimpleNamespace(prepare=cache._prepare_on_gpu))
    monkeypatch.setattr(tuning, "choose", lambda *_: tuning.Config(16, 16, 4, 1))
    monkeypatch.setattr(cache, "_known", {})


def tensors(n: int = 20, dim: int = 16, seed: int = 0) -> list[Any]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, n, dim, generator=rng) for _ in range(3)]


def find(q: Any, k: Any, v: Any, **more: Any) -> tuple[Any, Any]:
    return cache.find_or_prepare(q, k, v, "auto", {**OPTIONS, **more})


def attention(q: Any, k: Any, v: Any, **more: Any) -> Any:
    entry, inputs = find(q, k, v, **more)
    return entry.runner.forward(inputs)[0].numpy()


def expected(q: Any, k: Any, v: Any, **more: Any) -> Any:
    return ft.standard_attention(q.numpy(), k.numpy(), v.numpy(), **more)


def test_a_prepared_call_runs_other_values() -> None:
    first, _ = find(*tensors(seed=1))
    for seed in (2, 3):
        given = tensors(seed=seed)
        assert find(*given)[0] is first
        np.testing.assert_allclose(attention(*given), expected(*given), atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [{"causal": True}, {"softcap": 2.0}, {"window": (3, None)}, {"bias": torch.zeros(20, 20)}, {"dropout": 0.5}],
    ids=str,
)
def test_other_options_are_prepared_separately(more: dict[str, Any]) -> None:
    given = tensors()
    assert find(*given)[0] is not find(*given, **more)[0]
    assert find(*given, **more)[0] is find(*given, **more)[0]


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"causal": True, "window": (3, None), "softcap": 2.0}], ids=str)
def test_a_call_with_gradients_is_prepared_once(more: dict[str, Any]) -> None:
    """attention(), the operator and the backward pass share its entry."""
    given = tensors()
    first, _ = cache.find_or_prepare(*given, "auto", more)
    assert cache.find_or_prepare(*given, "auto", operands.operands(*given, "auto", more).options())[0] is first


def test_other_shapes_strides_and_alignments_are_prepared_separately() -> None:
    q, k, v = tensors()
    entries = [find(q, k, v)[0], find(*tensors(21))[0]]
    entries.append(find(q.swapaxes(1, 2).contiguous().swapaxes(1, 2), k, v)[0])
    room = torch.zeros(q.numel() + 1)
    shifted = room[1:].view(q.shape).copy_(q)
    entries.append(find(shifted, k, v)[0])
    entries.append(find(*(x.double() for x in (q, k, v)))[0])
    assert len(set(map(id, entries))) == len(entries)


def test_another_seed_uses_the_same_entry() -> None:
    given = tensors()
    entry, _ = find(*given, dropout=0.5, seed=1)
    for seed in (1, 2**31, 2**63 + 5, 2**64 - 1):
        assert find(*given, dropout=0.5, seed=seed)[0] is entry
        found = attention(*given, dropout=0.5, seed=seed)
        np.testing.assert_allclose(found, expected(*given, dropout=0.5, seed=seed), atol=1e-5)


def test_wrong_calls_are_refused_after_right_ones() -> None:
    given = tensors()
    find(*given, causal=True, dropout=0.5)
    with pytest.raises(ft.DTypeError, match="causal"):
        find(*given, causal=1, dropout=0.5)
    find(*given, window=(1, 2))
    with pytest.raises(ft.FlashtileError, match="window"):
        find(*given, window=(True, 2))
    find(*given, band=ft.Band(1, 2, 0))
    with pytest.raises(ft.FlashtileError, match="band"):
        find(*given, band=ft.Band(1.0, 2, 0))  # type: ignore[arg-type]
    with pytest.raises(ft.FlashtileError, match="seed"):
        find(*given, causal=True, dropout=0.5, seed=-1)


def test_a_call_with_an_unhashable_option_is_not_cached() -> None:
    given = tensors()
    np.testing.assert_allclose(attention(*given, window=[3, 0]), expected(*given, window=(3, 0)), atol=1e-5)
    assert not cache._known


def test_strided_columns_are_copied_each_time() -> None:
    q, k, v = tensors()
    apart = torch.zeros(1, 2, 20, 32)[..., ::2].copy_(q)
    np.testing.assert_allclose(attention(apart, k, v), expected(q, k, v), atol=1e-5)
    apart.mul_(2)
    np.testing.assert_allclose(attention(apart, k, v), expected(q * 2, k, v), atol=1e-5)
    assert not cache._known


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 3)
    for n in range(1, 9):
        find(*tensors(n))
    assert 1 <= sum(map(len, cache._known.values())) <= 3
    for _ in range(9):
        find(*(x.clone().requires_grad_(n % 2 == 0) for n, x in enumerate(tensors(1))))
    assert 1 <= sum(map(len, cache._known.values())) <= 3


def test_entries_hold_no_tensors() -> None:
    import gc
    import weakref

    given = tensors()
    attention(*given)
    alive = weakref.ref(given[0])
    del given
    gc.collect()
    assert alive() is None


def test_gradients_of_any_layout() -> None:
    """A gradient from expand() has strides of 0; for rank 3 and packed calls it has the caller's layout."""
    q, k, v = tensors()
    entry, inputs = find(q, k, v)
    out, lse = entry.runner.forward(inputs)
    ones = torch.ones(1).expand(out.shape)
    grads = entry.runner.backward(inputs, ones, out, lse, None)
    whole = ft.attention_backward(
        ones.contiguous().numpy(), *(x.numpy() for x in (q, k, v)), out.numpy(), lse.numpy(), backend="reference"
    )
    for found, exact in zip(grads[:3], whole[:3], strict=True):
        np.testing.assert_allclose(found.numpy(), exact, atol=1e-5)
    entry, inputs = find(q[0], k[0], v[0])
    out, lse = entry.runner.forward(inputs)
    grads = entry.runner.backward(inputs, ones[0], out, lse, None)
    assert grads.dq.shape == q[0].shape and lse.shape == (2, 20)
    np.testing.assert_allclose(grads.dq.numpy(), whole.dq[0], atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shared", ["rows", "heads"])
def test_float32_gradients_that_rows_or_heads_share(packed: bool, shared: str) -> None:
    """They are rounded to the dtype of q, and torch chooses the strides of such copies."""
    rng = torch.Generator().manual_seed(0)
    q, k, v, x = (torch.randn((20, 3, 16) if packed else (3, 20, 16), generator=rng) for _ in range(4))
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    more = {"cu_q": cu, "cu_k": cu} if packed else {}
    entry, inputs = find(q.half(), k.half(), v.half(), out_dtype="float32", **more)
    out, lse = entry.runner.forward(inputs)
    dout = x.narrow(int((shared == "heads") == packed), 0, 1).expand(x.shape)
    assert dout.stride(-1) == 1
    found, wanted = (entry.runner.backward(inputs, each, out, lse, None) for each in (dout, dout.contiguous()))
    for a, b in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):  # type: ignore[misc]
    pass


class Nested:
    """Like torch's nested tensors, without a shape."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("no sizes")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tensors without memory that pass as those of a GPU; launches do nothing."""
    found = [torch.empty(1, 2, 20, 16, device="meta") for _ in range(3)]
    monkeypatch.setattr(interception, "_PLAIN", interception._PLAIN | torch._C._dispatch_keys(found[0]).raw_repr())
    monkeypatch.setattr(LaunchSequence, "__call__", lambda self, *values: None)
    return found


def lookup(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return cache.lookup(q, k, v, "auto", options)


def test_a_call_like_one_before_is_found(given: list[Any]) -> None:
    assert lookup(*given) is None
    ft.attention(*given)
    known = lookup(*given)
    assert known is not None and not known.needs_gradients
    assert lookup(*(torch.empty_like(x) for x in given)) is known
    with torch.no_grad():
        assert lookup(*given) is known
    assert lookup(*given, causal=True) is None
    ft.attention(*given, causal=True)
    assert lookup(*given, causal=True) is not known
    sink = torch.empty(2, device="meta")
    ft.attention(*given, sink=sink)
    assert lookup(*given, sink=sink, seed=3) is lookup(*given, sink=sink)
    inputs = lookup(*given, sink=sink).inputs(*given, {"sink": sink, "seed": 3})
    assert inputs.sink is sink and inputs.seed == 3 and inputs.q is given[0] and inputs.bias is None


def test_entries_record_whether_gradients_are_needed(given: list[Any]) -> None:
    given[1].requires_grad_()
    out = ft.attention(*given)
    assert lookup(*given).needs_gradients and out.requires_grad
    assert ft.attention(*given).requires_grad
    with torch.no_grad():
        assert not ft.attention(*given).requires_grad
    given[1] = given[1].detach()
    assert not ft.attention(*given).requires_grad
    assert not lookup(*given).needs_gradients


def unlike(q: Any, k: Any, v: Any) -> dict[str, tuple[Any, ...]]:
    """Return calls that differ from that of q, k and v, valid and invalid ones."""
    return {
        "dtype": (q.double(), k.double(), v.double()),
        "keys": (q, k[:, :, 1:], v[:, :, 1:]),
        "width of values": (q, k, v[..., 1:]),
        "strides": (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        "gradients": (q, k, v.clone().requires_grad_()),
        "CPU": (torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)),
        "one on a CPU": (q, torch.zeros(k.shape), v),
        "subclass": (q.as_subclass(Subclass), k, v),
        "None": (q, None, v),
        "number": (q, 5, v),
        "NumPy": (q, k, np.zeros(v.shape, np.float32)),
        "nested": (q, Nested(), v),
        "nothing": (object(), k, v),
    }


@pytest.mark.parametrize("how", unlike(*(torch.empty(1, 2, 20, 16, device="meta") for _ in range(3))))
def test_another_call_is_not_found(how: str, given: list[Any]) -> None:
    ft.attention(*given)
    assert lookup(*unlike(*given)[how]) is None


@pytest.mark.parametrize("twice", ["q, k and v", "k and v", "cu_q and cu_k"])
@pytest.mark.parametrize("training", [False, True])
def test_a_tensor_passed_twice(twice: str, training: bool, given: list[Any]) -> None:
    """There is one entry, and it is not used for two different tensors."""
    cu = torch.empty(4, device="meta", dtype=torch.int32)
    calls: dict[str, Any] = {
        "q, k and v": (lambda x, *_: ft.attention(x, x, x)),
        "k and v": (lambda x, y, _: ft.attention(x, y, y)),
        "cu_q and cu_k": (lambda *x: ft.attention_packed(*(y[0].transpose(0, 1) for y in x), cu, cu)),
    }
    for _ in range(3):
        fresh = [torch.empty_like(x, requires_grad=training) for x in given]
        out = calls[twice](*fresh)
        if training:
            out.backward(torch.empty_like(out))
    assert sum(map(len, cache._known.values())) == 1
    if "cu" not in twice:
        assert lookup(*(torch.empty_like(x, requires_grad=training) for x in given)) is None


@pytest.mark.parametrize(
    "options",
    [
        {"causal": 1},
        {"causal": 1.0},
        {"causal": 0},
        {"window": [3, 0]},
        {"softcap": 1},
        {"seed": -1},
        {"seed": True},
        {"alibi": np.ones(2)},
    ],
    ids=str,
)
def test_other_options_are_not_found(options: dict[str, Any], given: list[Any]) -> None:
    ft.attention(*given)
    ft.attention(*given, causal=True)
    ft.attention(*given, softcap=1.0)
    ft.attention(*given, window=(3, 0))
    assert lookup(*given, **options) is None


@pytest.mark.parametrize("name", ["seed", "causal", "dropout", "softcap", "deterministic", "unknown"])
def test_none_is_recalled_only_where_it_is_valid(name: str, given: list[Any]) -> None:
    ft.attention(*given)
    assert lookup(*given, mask=None, window=None) is not None
    assert lookup(*given, **{name: None}) is None


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("kind", [torch.tensor, Index])
def test_numbers_that_may_change_are_read_each_time(kind: Any, given: list[Any]) -> None:
    number = kind(2)
    for options in ({"window": (number, 0)}, {"band": ft.Band(number, 0, 0)}, {"threads": number}):
        ft.attention(*given, **options)
        assert lookup(*given, **options) is None
    assert not cache._known
    ft.attention(*given, window=(np.int64(2), 0), scale=np.float64(0.5), out_dtype=np.float32)
    assert lookup(*given, window=(np.int64(2), 0), scale=np.float64(0.5), out_dtype=np.float32) is not None


def test_few_calls_share_a_key(given: list[Any]) -> None:
    for n in range(3 * cache.MAX_PER_KEY):
        q = torch.empty(1, 2, 20, 16 + n, device="meta")[..., :16]
        ft.attention(q, *given[1:])
    assert [len(found) for found in cache._known.values()] == [cache.MAX_PER_KEY]
    assert lookup(q, *given[1:]) is not None


def test_descale_is_checked_each_time(given: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry holds the factors as one tensor, a form that a caller must not pass."""
    row = next(row for row in dispatch.TABLE if row.name == "gluon")
    monkeypatch.setattr(cache, "dispatch", SimpleNamespace(choose=lambda *_: row))
    given = [torch.empty(1, 2, 64, 64, device="meta", dtype=torch.float8_e4m3fn) for _ in range(3)]
    factors = tuple(torch.empty((), device="meta") for _ in range(3))
    ft.attention(*given, descale=factors)
    assert cache._known
    with pytest.raises(ft.ShapeError, match="descale: expected three factors"):
        ft.attention(*given, descale=torch.empty(1, 1, 3, device="meta"))


def seen_within(how: str, q: Any, k: Any, v: Any) -> Any:
    """Look a call up in the cache while a mode, transform or autocast is active."""
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append((lookup(q, k, v), lookup(x, k, v)))
        return x * 1

    if how == "vmap":
        torch.vmap(look)(q)
    elif how == "grad":
        torch.func.vjp(look, q)
    elif how == "jvp":
        torch.func.jvp(look, (q,), (q,))
    elif how == "functionalize":
        torch.func.functionalize(look)(q)
    elif how == "make_fx":
        make_fx(look)(q)
    elif how == "jit":
        torch.jit.trace(look, (q,), check_trace=False)
    elif how == "dual":
        with forward_ad.dual_level():
            look(forward_ad.make_dual(q, q))
    else:
        modes = {
            "function mode": FunctionMode,
            "dispatch mode": DispatchMode,
            "fake": partial(torch._subclasses.FakeTensorMode, allow_non_fake_inputs=True),
            "autocast": partial(torch.autocast, "cpu"),
        }
        with modes[how]():
            look(q)
    return seen


INTERCEPTORS = [
    *("vmap", "grad", "jvp", "functionalize", "make_fx", "jit", "dual"),
    *("function mode", "dispatch mode", "fake", "autocast"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*vmap")
@pytest.mark.parametrize("how", INTERCEPTORS)
def test_nothing_is_found_while_a_mode_or_transform_is_active(how: str, given: list[Any]) -> None:
    ft.attention(*given)
    assert lookup(*given) is not None
    found = seen_within(how, *given)
    assert found and all(each == (None, None) for each in found)
    assert lookup(*given) is not None


def test_an_intercepted_call_is_not_cached(given: list[Any]) -> None:
    """An identical intercepted call does not find it either."""
    with DispatchMode():
        ft.attention(*given)
        assert lookup(*given) is None
    seen = []

    def look(x: Any) -> Any:
        out = ft.attention(x, *given[1:])
        seen.append(lookup(x, *given[1:]))
        return out

    torch.func.vjp(look, given[0])
    assert seen == [None]


def test_calls_of_a_subclass_are_not_cached(given: list[Any]) -> None:
    """Inside its __torch_function__ the tensors look like plain ones."""
    with torch.inference_mode():  # where tensors are the same to the dispatcher before the operator and within
        mine = [x.clone().as_subclass(Subclass) for x in given]
        with torch._C.DisableTorchFunctionSubclass():
            cache.find_or_prepare(*mine, "auto", {})
        assert lookup(*mine) is None
    parameters = [torch.nn.Parameter(x, requires_grad=False) for x in given]
    ft.attention(*parameters)
    assert lookup(*parameters) is not None


def test_deterministic_algorithms_have_an_entry_of_their_own(given: list[Any]) -> None:
    ft.attention(*given)
    torch.use_deterministic_algorithms(True)
    try:
        count = sum(map(len, cache._known.values()))
        ft.attention(*given)
        assert sum(map(len, cache._known.values())) == count + 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_three_tensors_need_not_be_q_k_and_v(given: list[Any]) -> None:
    """The tensors of a call are guarded without duplicates: of q, v and a mask there are three, too."""
    x, v, _ = given
    mask = torch.ones(20, 20, dtype=torch.bool, device="meta")
    for _ in range(3):
        ft.attention(x, x, v, mask=mask)
    assert sum(map(len, cache._known.values())) == 1
