"""attention() of shards: which method "auto" is, layouts, autocast, results without gradients, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashtile as ft  # noqa: E402
from flashtile import distributed  # noqa: E402
from flashtile.distributed import Shards, context_parallel, operators  # noqa: E402
from flashtile.distributed.arguments import Arguments  # noqa: E402
from flashtile.distributed.plan import Method  # noqa: E402
from tests.support.simulated_ranks import simulate  # noqa: E402


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "tokens", "method"),
    [
        (8, 32, 8, 1024, Method(8, 1)),
        (8, 32, 4, 1024, Method(1, 8, gather=True)),  # key heads do not divide
        (2, 32, 4, 1024, Method(1, 2, gather=True)),  # heads are more than two ranks' keys
        (16, 32, 8, 1 << 22, Method(1, 16)),  # too much to gather
    ],
)
def test_auto(ranks: int, heads: int, kv_heads: int, tokens: int, method: Method) -> None:
    q, k = (torch.empty(1, n, tokens // ranks, 64, device="meta", dtype=torch.bfloat16) for n in (heads, kv_heads))
    call = Arguments(q, k, k, {}, 4, False)
    assert context_parallel.method_of("auto", ranks, Shards.contiguous(tokens, ranks=ranks), call) == method


def test_auto_runs() -> None:
    shards = Shards.zigzag(30, ranks=3)
    x = torch.randn(1, 3, 30, 8)
    parts = simulate(
        3, lambda group: distributed.attention(*[shards.shard(x, group.rank())] * 3, group=group, shards=shards)
    )
    assert torch.allclose(shards.restore(parts), ft.attention(x, x, x), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axis", "layout"), [((20, 3, 8), 0, "bnhd"), ((3, 20, 8), 1, None), ((20, 8), 0, None)]
)
def test_fewer_axes(shape: tuple[int, ...], axis: int, layout: str | None) -> None:
    """Packed tokens are (tokens, heads, dim)."""
    documents = [7, 13]
    shards = Shards.contiguous(documents=documents, ranks=3)
    x = torch.randn(shape)

    def job(group: Any) -> Any:
        part = shards.shard(x, group.rank(), axis)
        return distributed.attention(
            part, part, part, group=group, shards=shards, causal=True, layout=layout, return_lse=True
        )

    out, lse = (shards.restore(parts, axis) for parts in zip(*simulate(3, job), strict=True))
    spans = ft.masks.documents(lengths=torch.tensor(documents))
    wanted = ft.attention(x, x, x, spans=spans, causal=True, layout=layout, return_lse=True)
    assert torch.allclose(out, wanted[0], atol=1e-6) and torch.allclose(lse, wanted[1], atol=1e-6)


def test_autocast_and_partial_results() -> None:
    shards = Shards.striped(24, ranks=2)
    x = torch.randn(1, 2, 24, 8)

    def job(group: Any) -> Any:
        part = shards.shard(x, group.rank())
        with torch.autocast("cpu", torch.bfloat16):
            narrow = distributed.attention(part, part, part, group=group, shards=shards)
        wide = distributed.attention(*[part.bfloat16()] * 3, group=group, shards=shards, out_dtype="float32")
        return narrow, wide

    for narrow, wide in simulate(2, job):
        assert narrow.dtype is torch.bfloat16 and wide.dtype is torch.float32
        assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"method": "fast"}, ft.ShapeError, "method: expected auto, gather, ring, ulysses"),
        ({"method": (2, 2)}, ft.ShapeError, "two sizes whose product is 2"),
        ({"method": (2,)}, ft.ShapeError, "two sizes whose product is 2"),
        ({"method": (2.0, 1.0)}, ft.DTypeError, "method: expected an integer"),
        ({"return_lse": 1}, ft.DTypeError, "return_lse: expected True or False"),
        ({"bias": [1.0]}, ft.DTypeError, "bias: expected a torch tensor"),
        ({"mask": np.ones((1, 1, 1, 8), bool)}, ft.DTypeError, "mask: expected a torch tensor"),
        ({"kv_lengths": np.array([16])}, ft.DTypeError, "kv_lengths: expected a torch tensor"),
        (
            {"mask": torch.ones(1, 1, 1, 8).bool(), "key_padding_mask": torch.ones(1, 7).bool()},
            ft.ShapeError,
            "key_padding_mask: expected 8 keys",
        ),
        ({"shards": Shards.zigzag(16, ranks=3)}, ft.ShapeError, "shards: expected those of 2 ranks"),
        ({"shards": 16}, ft.DTypeError, "shards: expected a flashtile.distributed.Shards"),
        ({"mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)}, ft.ShapeError, "mask: expected"),
        ({"bias": torch.ones(1, 1, 1, 8, dtype=torch.int64)}, ft.DTypeError, "bias: expected float32"),
        ({"alibi": torch.ones(3)}, ft.ShapeError, "alibi: expected shape"),
        ({"kv_lengths": [17]}, ft.ShapeError, "kv_lengths: expected values from 0"),
        ({"spans": ft.Spans(torch.zeros(5).int(), torch.ones(5).int())}, ft.ShapeError, "spans: expected 1 or 16"),
        ({"descale": (1.0, 1.0, 1.0)}, ft.FlashtileError, "q, k, v|descale"),
        ({"backend": "sdpa", "sink": torch.ones(2)}, ft.UnsupportedError, "sink: the sdpa backend"),
    ],
    ids=str,
)
def test_refused(more: dict[str, Any], error: type, message: str) -> None:
    x = torch.randn(1, 2, 8, 8)
    options = {"shards": Shards.zigzag(16, ranks=2), **more}
    with pytest.raises(error, match=message):
        simulate(2, lambda group: distributed.attention(x, x, x, group=group, **options))


def test_an_error_of_any_kind_reaches_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    check = context_parallel.check

    def fails_on_one(call: Any, *args: Any) -> None:
        if call.q.shape[2] == 9:
            raise KeyError("of rank 1")
        check(call, *args)

    monkeypatch.setattr(context_parallel, "check", fails_on_one)
    shards = Shards.contiguous(17, ranks=2)

    def job(group: Any) -> str:
        x = torch.randn(1, 2, shards.counts[group.rank()], 8)
        try:
            distributed.attention(x, x, x, group=group, shards=shards)
        except (KeyError, ft.MismatchError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    first, second = simulate(2, job, timeout=10)
    assert "rank 1 refused the call: KeyError: 'of rank 1'" in first and second.startswith("KeyError")


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_gradients_of_wide_results(method: str) -> None:
    shards = Shards.zigzag(16, ranks=2)
    x = torch.randn(1, 2, 16, 8).bfloat16()
    dout = torch.randn(1, 2, 16, 8)

    def job(group: Any) -> Any:
        part = shards.shard(x, group.rank()).requires_grad_()
        out = distributed.attention(part, part, part, group=group, shards=shards, method=method, out_dtype="float32")
        return torch.autograd.grad(out, part, shards.shard(dout, group.rank()))[0]

    whole = x.requires_grad_()
    (wanted,) = torch.autograd.grad(ft.attention(whole, whole, whole, out_dtype="float32"), whole, dout)
    torch.testing.assert_close(shards.restore(simulate(2, job)), wanted, rtol=2e-2, atol=2e-2)


def second_derivative(call: Any, x: Any) -> None:
    x.requires_grad_()
    (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    torch.autograd.grad(grad.square().sum(), x)


def forward_derivative(call: Any, x: Any) -> None:
    torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize(
    ("derivative", "message"), [(second_derivative, "differentiated once"), (forward_derivative, "no forward-mode")]
)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of torch.func.jvp
def test_other_derivatives_are_refused(derivative: Any, message: str, method: str) -> None:
    shards = Shards.zigzag(16, ranks=2)

    def job(group: Any) -> None:
        def call(x: Any) -> Any:
            return distributed.attention(x, x, x, group=group, shards=shards, method=method)

        derivative(call, torch.randn(1, 2, 8, 8))

    with pytest.raises(ft.UnsupportedError, match=message):
        simulate(2, job)


@pytest.mark.parametrize("of_keys", [True, False])
@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_compiled_gradients_lie_where_the_eager_ones_do(
    method: str, of_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake says in which order gradients of transposed inputs are in memory."""
    if method == "ulysses" and not of_keys:
        pytest.skip("refused")
    shards, run, calls = Shards.zigzag(16, ranks=2), operators.BACKWARD, []
    monkeypatch.setattr(operators, "BACKWARD", lambda *args: (calls.append((args, run(*args))), calls[-1][1])[1])

    def job(group: Any) -> None:
        qkv = torch.randn(2, 8, 3, 4, 8, requires_grad=True)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # of one projection
        bias = torch.randn(1, 1 if of_keys else 8, 8 if of_keys else 16, 4).movedim(-1, 1).requires_grad_()
        x = torch.randn(2, 8, 4, 8).transpose(1, 2).requires_grad_()
        for keys in (k, x):
            distributed.attention(q, keys, v, group=group, shards=shards, method=method, bias=bias).sum().backward()

    simulate(2, job)
    assert len(calls) == 4
    for args, found in calls:
        mode = torch._subclasses.FakeTensorMode()
        fakes = [mode.from_tensor(x.detach()) if isinstance(x, torch.Tensor) else x for x in args]
        with mode:
            fake = run(*fakes)
        for x, y in zip(found, fake, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_gradients_of_slopes_are_refused_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the checks of a call are left to the operator."""
    monkeypatch.setattr(context_parallel, "check", lambda *_: None)
    shards, slopes = Shards.zigzag(16, ranks=2), torch.ones(2, requires_grad=True)
    x = torch.randn(1, 2, 8, 8)
    with pytest.raises(ft.UnsupportedError, match="alibi: expected slopes that need no gradient"):
        simulate(2, lambda group: distributed.attention(x, x, x, group=group, shards=shards, alibi=slopes))


def test_groups_that_are_none() -> None:
    x, shards = torch.ones(1, 1, 4, 8), Shards.zigzag(4, ranks=1)
    with pytest.raises(ft.DTypeError, match="group: expected a ProcessGroup that this rank is in"):
        distributed.attention(x, x, x, group=torch.distributed.GroupMember.NON_GROUP_MEMBER, shards=shards)
    with pytest.raises(ft.DTypeError, match="group: expected a ProcessGroup or a DeviceMesh, got None"):
        distributed.attention(x, x, x, shards=shards)


def test_many_heads_of_16_bits() -> None:
    """Options of many numbers are compared by their digests."""
    shards = Shards.zigzag(8, ranks=2)
    x, numbers = torch.randn(1, 64, 4, 8).bfloat16(), torch.rand(64).bfloat16()

    def job(group: Any) -> Any:
        return distributed.attention(x, x, x, group=group, shards=shards, sink=numbers, alibi=numbers).shape

    assert simulate(2, job) == [x.shape] * 2


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_flops_of_all_ranks_are_those_of_the_whole(method: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    shards = Shards.striped(documents=[7, 13], ranks=2)

    def job(group: Any) -> int:
        x = torch.randn(2, 4, shards.counts[group.rank()], 8, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            distributed.attention(x, x, x, group=group, shards=shards, method=method).sum().backward()
        return int(counter.get_total_flops())

    assert sum(simulate(2, job)) == 2 * 2 * 4 * (7 * 7 + 13 * 13) * 7 * 8
