"""A seed in a tensor: the same bits as for the number, and one graph for all numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import flashtile as ft  # noqa: E402
from flashtile.compat.flash_attn import flash_attn_func  # noqa: E402
from flashtile.compat.sdpa import scaled_dot_product_attention  # noqa: E402
from flashtile.pytorch import calls, entry, operands, operators  # noqa: E402
from tests.pytorch.samples import every_backend, randn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SEEDS = (0, 5, 2**31, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def tensor(seed: int) -> Any:
    """Return an int64 tensor with the bits of an unsigned 64-bit number."""
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed)


def qkv(grad: bool = True) -> list[Any]:
    shapes = ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6))
    return [randn(*shape, dtype=torch.float32, requires_grad=grad) for shape in shapes]


def passes(run: Callable[..., Any], seed: Any) -> list[Any]:
    given = qkv()
    out = run(*given, seed)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


def drop(q: Any, k: Any, v: Any, seed: Any, **more: Any) -> Any:
    return ft.attention(q, k, v, causal=True, dropout=0.5, seed=seed, **more)


def equal(found: list[Any], wanted: list[Any]) -> bool:
    return all(map(torch.equal, found, wanted))


@every_backend
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_bits_as_the_number(seed: int, backend: str) -> None:
    wanted = passes(lambda *x: drop(*x, backend=backend), seed)
    for given in (tensor(seed), tensor(seed)[None]):
        for _ in range(2):
            assert equal(passes(lambda *x: drop(*x, backend=backend), given), wanted)
    assert not equal(passes(lambda *x: drop(*x, backend=backend), tensor(seed ^ 1)), wanted)


def test_the_reference_and_packed_calls() -> None:
    q, k, v = qkv(False)
    assert torch.equal(*(drop(q, k, v, seed, backend="reference") for seed in (7, tensor(7))))
    x, starts = randn(9, 2, 8), torch.tensor([0, 4, 9])
    packed = [ft.attention_packed(x, x, x, starts, starts, dropout=0.5, seed=seed) for seed in (7, tensor(7))]
    assert torch.equal(*packed)


def test_without_dropout_the_seed_has_no_effect() -> None:
    q, k, v = qkv(False)
    assert torch.equal(ft.attention(q, k, v, seed=tensor(7)), ft.attention(q, k, v))


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_one_graph_for_all_values_of_a_counter(inner: str) -> None:
    compiled = torch.compile(drop, fullgraph=True, backend=inner)
    counter = torch.zeros((), dtype=torch.int64)
    for n in range(12):
        assert equal(passes(compiled, counter), passes(drop, n))
        counter.add_(1)
    assert counters["stats"]["unique_graphs"] == 1


DRAWN: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.randint(2**63 - 1, ()),
    "a number": lambda: int(torch.randint(2**63 - 1, ())),
    "item": lambda: torch.randint(2**63 - 1, (1,)).item(),
}


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("how", DRAWN)
def test_seeds_drawn_in_the_graph(how: str, recorded: bool) -> None:
    def run(q: Any, k: Any, v: Any, seed: Any) -> Any:
        return drop(q, k, v, DRAWN[how]())

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(recorded):
        for n in range(3):
            results = []
            for each in (compiled, run):
                torch.manual_seed(n)
                results.append(passes(each, None) if recorded else [each(*qkv(False), None)])
            assert equal(*results)
    assert counters["stats"]["unique_graphs"] == 1


COMPAT: dict[str, Callable[..., Any]] = {
    "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True),
    "flash_attn": lambda q, k, v: flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.5),
    "nothing dropped": lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.0, enable_gqa=True),
}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", COMPAT)
def test_dropout_of_compat_functions_compiles(name: str, inner: str) -> None:
    """In one graph, which drops other weights in each run, and the same ones for the same generator state."""
    compiled = torch.compile(COMPAT[name], fullgraph=True, backend=inner)

    def run(*given: Any) -> Any:
        return compiled(*given[:-1])

    torch.manual_seed(0)
    found = [passes(run, None) for _ in range(4)]
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(found[0][0], found[1][0]) == (name == "nothing dropped")
    torch.manual_seed(0)
    assert equal(passes(run, None), found[0]) and equal(passes(run, None), found[1])


def test_the_dropout_of_transformers_compiles() -> None:
    pytest.importorskip("transformers")
    from flashtile.compat.transformers import forward

    layer = torch.nn.Module()
    compiled = torch.compile(
        lambda q, k, v: forward(layer, q, k, v, None, dropout=0.5)[0], fullgraph=True, backend="aot_eager"
    )
    one, other = (compiled(*qkv(False)) for _ in range(2))
    assert one.shape == (2, 9, 4, 6) and not torch.equal(one, other)
    assert counters["stats"]["unique_graphs"] == 1


def test_writing_to_the_seed_of_a_graph_is_an_error_in_the_backward_pass() -> None:
    """The tensor is saved, not copied."""
    seed = tensor(5)
    compiled = torch.compile(drop, fullgraph=True, backend="aot_eager")
    out = compiled(*qkv(), seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_eager_calls_read_the_number_at_once() -> None:
    seed, given = tensor(5), qkv()
    out = drop(*given, seed)
    seed.add_(1)
    found = [out.detach(), *torch.autograd.grad(out.square().sum(), given)]
    assert equal(found, passes(drop, 5))


def test_a_seed_that_only_kernels_read_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(entry, "resolve_seed", lambda seed: seed)
    calls._known.clear()
    for _ in range(2):  # the second call is cached
        given, seed = qkv(), tensor(5)
        out = drop(*given, seed)
        found = [out.detach(), *torch.autograd.grad(out.square().sum(), given, retain_graph=True)]
        assert equal(found, passes(drop, 5))
        seed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    one, other = (drop(*qkv(False), tensor(seed)) for seed in (6, 7))
    assert torch.equal(one, drop(*qkv(False), 6)) and torch.equal(other, drop(*qkv(False), 7))


def test_the_operator_saves_the_seed() -> None:
    given, seed = qkv(), tensor(5)
    out, _ = operators.ATTENTION(*operands.operands(*given, "auto", {"causal": True, "dropout": 0.5, "seed": seed}))
    found = [out.detach(), *torch.autograd.grad(out.square().sum(), given, retain_graph=True)]
    assert equal(found, passes(drop, 5))
    seed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_vmap() -> None:
    q, k, v = qkv(False)
    seeds = torch.arange(3)
    found = torch.vmap(lambda seed: drop(q, k, v, seed))(seeds)
    assert torch.equal(found, torch.stack([drop(q, k, v, n) for n in range(3)]))
    found = torch.vmap(lambda x: drop(x, k, v, tensor(4)))(torch.stack([q, 2 * q]))
    assert torch.equal(found, torch.stack([drop(q, k, v, 4), drop(2 * q, k, v, 4)]))
    found = torch.vmap(lambda x, seed: ft.attention(x, k, v, seed=seed))(torch.stack([q, 2 * q]), seeds[:2])
    torch.testing.assert_close(found, torch.stack([ft.attention(q, k, v), ft.attention(2 * q, k, v)]))
    grads = torch.vmap(torch.func.grad(lambda x, seed: drop(x, k, v, seed).sum()), (None, 0))(q, seeds)
    assert torch.equal(grads[2], torch.func.grad(lambda x: drop(x, k, v, 2).sum())(q))


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_export(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, seed: Any) -> Any:
            return drop(q, k, v, seed)

    exported = torch.export.export(Module(), (*qkv(False), tensor(3)), strict=strict).module()
    for seed in (3, 4, 2**63):
        assert torch.equal(exported(*qkv(False), tensor(seed)), drop(*qkv(False), seed))


def test_tracing_and_autocast() -> None:
    given = qkv(False)
    traced = make_fx(lambda q, k, v, seed: drop(q, k, v, seed))(*given, tensor(3))
    assert torch.equal(traced(*given, tensor(4)), drop(*given, 4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert drop(*(torch.empty(x.shape) for x in given), torch.zeros((), dtype=torch.int64)).shape == (2, 4, 9, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(*(drop(*given, seed) for seed in (3, tensor(3))))


def test_a_freed_or_sparse_seed_is_refused() -> None:
    given, freed = qkv(False), tensor(3)
    drop(*given, 3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ft.ShapeError, match=r"^seed: expected a storage of at least 8 bytes"):
        drop(*given, freed)
    with pytest.raises(ft.DTypeError, match=r"^seed: expected a dense tensor, got torch.sparse_coo"):
        drop(*given, torch.zeros(1, dtype=torch.int64).to_sparse())


def test_cached_calls_accept_numbers_and_tensors() -> None:
    calls._known.clear()
    for seed in (1, 2):
        assert torch.equal(drop(*qkv(False), seed), drop(*qkv(False), tensor(seed)))
    assert sum(map(len, calls._known.values())) <= 1


def test_plan_ignores_the_seed() -> None:
    assert ft.plan((9, 8), (9, 8), dropout=0.5, seed=tensor(3)) == ft.plan((9, 8), (9, 8), dropout=0.5)
