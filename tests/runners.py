"""Every way to run a call that this machine has: each backend of the table, and tiles in both orders and odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import flashtile as ft
from flashtile import dispatch
from flashtile.backends import tiles
from flashtile.dtypes import name_of, narrow
from flashtile.problem import check_gradients
from tests.grid import Call


@dataclass(frozen=True)
class Runner:
    """forward(call) -> out, lse; backward(call, out, lse) -> Grads; both as the public functions give them.

    refusal(call): why it does not take a call; None where it does.
    """

    name: str
    forward: Callable[[Call], tuple[Any, Any]]
    backward: Callable[[Call, Any, Any], ft.Grads]
    refusal: Callable[[Call], str | None] = lambda call: None


def public(name: str, **more: Any) -> Runner:
    def forward(call: Call) -> tuple[Any, Any]:
        if call.packed:
            return ft.attention_packed(
                call.q, call.k, call.v, **call.packed, return_lse=True, backend=name, **call.options, **more
            )
        return ft.attention(call.q, call.k, call.v, return_lse=True, backend=name, **call.options, **more)

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        return ft.attention_backward(
            call.dout,
            call.q,
            call.k,
            call.v,
            out,
            lse,
            dlse=call.dlse,
            backend=name,
            **call.packed,
            **call.options,
            **more,
        )

    return Runner(name, forward, backward)


def tiled(order: str, block_q: int, block_k: int) -> Runner:
    def forward(call: Call) -> tuple[Any, Any]:
        problem = call.problem()
        out, lse = tiles.forward(problem, order, block_q, block_k)
        return problem.as_given(narrow(out, problem.out_dtype)), problem.as_given(lse)

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        problem = call.problem()
        dout, out, lse, dlse = check_gradients(problem, call.dout, out, lse, call.dlse)
        grads = tiles.backward(problem, dout, out, lse, dlse, block_q, block_k)
        dq, dk, dv = (problem.as_given(narrow(x, problem.dtype)) for x in grads[:3])
        dbias, dsink = (
            None if x is None else narrow(x, name_of(given.dtype)).reshape(given.shape)
            for x, given in ((grads.dbias, call.options.get("bias")), (grads.dsink, call.options.get("sink")))
        )
        return ft.Grads(dq, dk, dv, dbias, dsink)

    return Runner(f"tiles {order} {block_q}x{block_k}", forward, backward)


RUNNERS = (
    *(public(row.name) for row in dispatch.TABLE if row.device == "cpu"),
    tiled("fa1", 16, 24),
    tiled("fa2", 7, 50),
)


def missing(name: str) -> str | None:
    """Why a backend cannot run here, in the words of the dispatch table."""
    for row in dispatch.TABLE:
        if row.name == name.split()[0]:
            return row.missing() if hasattr(row.load(), "forward") else "it is not there"
    return None


def or_skip(runner: Runner) -> Any:
    """The runner as a parameter, skipped with the reason where this machine has no such backend."""
    reason = missing(runner.name)
    marks = [pytest.mark.skip(reason=f"{runner.name}: {reason}")] if reason else []
    return pytest.param(runner, id=runner.name, marks=marks)


every_runner = pytest.mark.parametrize("runner", [or_skip(r) for r in RUNNERS])
