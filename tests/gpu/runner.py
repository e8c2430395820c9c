"""The public functions and autograd on tensors of a device, by any backend, for the calls of the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import flashtile as ft
from flashtile import dispatch
from flashtile.problem import describe
from flashtile.pytorch.bridge import to_numpy, to_torch
from tests.gpu.placement import NO_FENCE, Fence, Placed, place, same_bits
from tests.pytorch.samples import run
from tests.support.grid import GRADIENTS, Call, Case, Truth, build, check_backward, check_forward, truth
from tests.support.runners import Runner

BACKENDS = tuple(row.name for row in dispatch.TABLE if row.device == "cuda")


def by_each(*backends: str) -> tuple[pytest.MarkDecorator, ...]:
    """For `pytestmark`: run every test of a module once with each of these. conftest.py has the fixture."""
    return pytest.mark.usefixtures("backend"), pytest.mark.parametrize("backend", backends, indirect=True)


each_backend = by_each(*BACKENDS)
DIFFERENTIABLE = dict(zip(GRADIENTS, ("q", "k", "v", "bias", "sink"), strict=True))


class Route:
    """The public functions, by one backend for tensors on a GPU.

    If it does not support the first call, the test is skipped. Later calls may use the portable backend, so that tests
    of many calls cover their alternation.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.taken = 0

    def __call__(self, function: Callable[..., Any], q: Any, *args: Any, **options: Any) -> Any:
        if "backend" in options or not getattr(q, "is_cuda", False):
            return function(q, *args, **options)
        try:
            result = function(q, *args, **options, backend=self.backend)
        except ft.UnsupportedError as error:
            if not str(error).startswith(f"backend: {self.backend} cannot"):
                raise
            if not self.taken:
                pytest.skip(str(error))
            return function(q, *args, **options, backend="triton")
        self.taken += 1
        return result


_routes: list[Route] = []


@contextmanager
def by(backend: str) -> Iterator[Route]:
    """Within it, calls that name no backend use this one."""
    route = Route(backend)
    functions = {name: partial(route, getattr(ft, name)) for name in ("attention", "attention_packed")}
    _routes.append(route)
    try:
        with mock.patch.multiple(ft, **functions):
            yield route
    finally:
        _routes.pop()


class Given:
    """A call of the grid on a device."""

    def __init__(self, call: Call, device: str, fence: Fence = NO_FENCE) -> None:
        whole = {"q": call.q, "k": call.k, "v": call.v, "dout": call.dout, "dlse": call.dlse}
        whole |= call.packed | call.options
        if "spans" in whole:
            whole["spans"] = whole["spans"].limits
        self.placed: dict[str, Placed] = {
            name: place(x, device, fence) for name, x in whole.items() if isinstance(x, np.ndarray)
        }
        self.arguments: dict[str, Any] = whole | {name: p.tensor for name, p in self.placed.items()}
        self.dout, self.dlse = self.arguments.pop("dout"), self.arguments.pop("dlse")
        if "spans" in whole:
            self.arguments["spans"] = ft.Spans.of(self.arguments["spans"])

    def refusal(self, device: str) -> str | None:
        """Why a call on such tensors is not for the backend that it would go to; None where it is."""
        problem = describe(**self.arguments)
        wanted = [_routes[-1].backend] if _routes else BACKENDS
        reasons = [row.why_not(problem, device) for row in dispatch.TABLE if row.name in wanted]
        return None if None in reasons else "; ".join(str(reason) for reason in reasons)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The differentiable inputs, by the names of their gradients."""
        names = {grad: name for grad, name in DIFFERENTIABLE.items() if name in self.placed}
        return {grad: self.arguments[name] for grad, name in names.items()}

    def forward(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out, lse = run(**self.arguments)
        return out, lse

    def step(self) -> tuple[Tensor, ...]:
        """out, lse, and the gradients of all inputs that have one."""
        for x in self.leaves.values():
            x.requires_grad_()
        out, lse = run(**self.arguments)
        results, grads = ((out,), (self.dout,)) if self.dlse is None else ((out, lse), (self.dout, self.dlse))
        found = torch.autograd.grad(results, tuple(self.leaves.values()), grads)
        for x in self.leaves.values():
            x.requires_grad_(False)
        return out.detach(), lse.detach(), *found

    def alike(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
        """Whether results of forward() or step() have the same bits; dQ may be a sum in no fixed order."""
        loose = bool(_routes) and _routes[-1].backend == "gluon" and not self.arguments.get("deterministic")
        return all(
            close(x, y) if loose and n == 2 else same_bits(x, y)
            for n, (x, y) in enumerate(zip(found, wanted, strict=True))
        )

    def check_untouched(self) -> None:
        for name, placed in self.placed.items():
            assert placed.unchanged(), f"{name}, or memory beside it, was written to"


def close(x: Tensor, y: Tensor) -> bool:
    """Whether the numbers are equal up to the order in which they were summed in float32 before rounding."""
    x, y = x.double(), y.double()
    largest = float(y.nan_to_num(0.0, 0.0, 0.0).abs().max()) if y.numel() else 0.0
    return torch.allclose(x, y, rtol=2.0**-7, atol=2.0**-16 * largest, equal_nan=True)


def refusal(call: Call, device: str = "cuda", fence: Fence = NO_FENCE) -> str | None:
    """Why a call is not for the backend that it would go to; None where it is. A CPU takes every call."""
    return None if device == "cpu" else Given(call, device, fence).refusal(device)


def on(device: str, fence: Fence = NO_FENCE) -> Runner:
    """A runner that uses flashtile.attention(), attention_packed() and autograd."""

    def forward(call: Call) -> tuple[Any, Any]:
        given = Given(call, device, fence)
        out, lse = given.forward()
        assert out.device.type == lse.device.type == device and out.stride(-1) == 1 and lse.is_contiguous()
        given.check_untouched()
        return to_numpy(out.cpu()), to_numpy(lse.cpu())

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        given = Given(call, device, fence)
        again, lse_again, *grads = given.step()
        assert same_bits(again.cpu(), to_torch(out)), "recorded and plain calls differ"
        assert same_bits(lse_again.cpu(), to_torch(lse)), "recorded and plain calls differ in the lse"
        given.check_untouched()
        found = {name: to_numpy(x.cpu()) for name, x in zip(given.leaves, grads, strict=True)}
        return ft.Grads(**(dict.fromkeys(GRADIENTS) | found))

    return Runner(device, forward, backward, partial(refusal, device=device, fence=fence))


CUDA = on("cuda")


def agree(*cases: Case, runner: Runner = CUDA, backward: bool = True) -> None:
    """Compare all of these with the oracle; cases that share kernels share a test, and each failure is reported."""
    wrong, refused = [], []
    for case in cases:
        call = build(case)
        if reason := runner.refusal(call):
            refused.append(reason)
            continue
        try:
            check(call, truth(case), runner, backward)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)
    if len(refused) == len(cases):
        pytest.skip(refused[0])


def check(call: Call, exact: Truth, runner: Runner = CUDA, backward: bool = True) -> None:
    """Compare one call with its known results."""
    out, lse = runner.forward(call)
    check_forward(call, exact, out, lse)
    if backward:
        check_backward(call, exact, runner.backward(call, out, lse))
