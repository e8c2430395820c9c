"""torch.utils.checkpoint: the gradients stay the same, and a policy that saves our operator saves its recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flashtile as ft  # noqa: E402
from flashtile.compat.sdpa import scaled_dot_product_attention  # noqa: E402
from flashtile.pytorch import OPERATORS, calls  # noqa: E402
from tests.pytorch.samples import randn  # noqa: E402

CALLS = {
    "attention": lambda q, k, v: ft.attention(q, k, v, causal=True),
    "lse": lambda q, k, v: ft.attention(q, k, v, return_lse=True)[1].sin(),
    "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "dropout": lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True),
}


def layer(call: Any, q: Any, k: Any, v: Any) -> Any:
    """Attention between other functions, which are recomputed."""
    return call(q.sin(), k.cos(), v.tanh()).exp()


def gradients(call: Any, wrap: Any) -> list[Any]:
    x = [randn(2, 4, 16, 8), randn(2, 2, 12, 8), randn(2, 2, 12, 6)]
    torch.manual_seed(3)
    x = [y.requires_grad_() for y in x]
    out = wrap(partial(layer, call), *x)
    out.sum().backward()
    return [out.detach(), *(y.grad for y in x)]


@pytest.fixture
def forward_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A list that grows with every forward pass that is computed."""
    found: list[str] = []
    calls._known.clear()
    make = calls.Entry.__init__

    class Counted:
        """A runner that is counted."""

        def __init__(self, runner: Any) -> None:
            self.runner = runner

        def forward(self, *arguments: Any) -> Any:
            found.append("forward")
            return self.runner.forward(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.runner, name)

    def counting(self: Any, backend: str, options: Any, runner: Any, *others: Any) -> None:
        make(self, backend, options, Counted(runner), *others)

    monkeypatch.setattr(calls.Entry, "__init__", counting)
    yield found
    calls._known.clear()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", CALLS)
def test_recomputed_gradients_are_the_same(name: str, reentrant: bool, forward_passes: list[str]) -> None:
    want = gradients(CALLS[name], lambda f, *x: f(*x))
    assert len(forward_passes) == 1
    found = gradients(CALLS[name], partial(checkpoint, use_reentrant=reentrant))
    assert len(forward_passes) == 3
    assert all(map(torch.equal, found, want))


def policy(save: bool, _context: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    if save and operator in OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", ["list", "policy", "nothing"])
@pytest.mark.parametrize("name", CALLS)
def test_a_policy_can_save_attention(name: str, way: str, compiled: bool, forward_passes: list[str]) -> None:
    if compiled and name == "dropout":
        pytest.skip("a compiled graph draws other random numbers")
    want = gradients(CALLS[name], lambda f, *x: f(*x))
    chosen: Any = OPERATORS if way == "list" else partial(policy, way == "policy")
    wrap: Any = partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, chosen)
    )
    if compiled:
        torch._dynamo.reset()
        wrap = torch.compile(wrap, fullgraph=True, backend="aot_eager")
    del forward_passes[:]
    found = gradients(CALLS[name], wrap)
    assert len(forward_passes) == (2 if way == "nothing" else 1)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y) if compiled else torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_operators_have_the_documented_names() -> None:
    assert [torch.ops.flashtile.attention.default] == OPERATORS
    assert str(OPERATORS[0]) == "flashtile.attention.default"
