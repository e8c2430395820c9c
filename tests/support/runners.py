"""Runners: every way to run a call on this machine, i.e. each backend, and tiles in both orders with odd sizes.

For a backend that takes only tensors, arrays are converted to tensors and the results back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile import dispatch
from flashtile.backends import tiles
from flashtile.checks.shapes import check_gradients
from flashtile.numerics.dtypes import name_of, narrow
from tests.support.grid import Call


@dataclass(frozen=True)
class Runner:
    """forward(call) -> out, lse; backward(call, out, lse) -> Grads; both return what the public functions return.

    refusal(call): why a call is not supported; None if it is.
    """

    name: str
    forward: Callable[[Call], tuple[Any, Any]]
    backward: Callable[[Call, Any, Any], ft.Grads]
    refusal: Callable[[Call], str | None] = lambda call: None
    same_bits: bool = True  # if only numbers differ that a result does not depend on


def api_runner(name: str, **more: Any) -> Runner:
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


def torch_runner(name: str) -> Runner:
    """Run a backend on tensors. For an unsupported call, check that the error says why, and skip the test."""
    row = next(row for row in dispatch.TABLE if row.name == name)

    def given(call: Call) -> tuple[list[Any], dict[str, Any]]:
        from tests.pytorch.samples import tensor

        options: dict[str, Any] = {}
        for key, x in (call.packed | call.options).items():
            options[key] = tensor(x) if isinstance(x, np.ndarray) else x
            if isinstance(x, ft.Spans):
                options[key] = ft.Spans.of(tensor(x.limits))
        return [tensor(x) for x in (call.q, call.k, call.v)], options

    def refusal(call: Call) -> str | None:
        return row.why_not(call.problem(), "cpu", tensors=True)

    def forward(call: Call) -> tuple[Any, Any]:
        from flashtile.pytorch.bridge import to_numpy
        from tests.pytorch.samples import run

        tensors, options = given(call)
        if reason := refusal(call):
            with pytest.raises(ft.UnsupportedError, match=re.escape(f"backend: {name} cannot run this: {reason}")):
                run(*tensors, backend=name, **options)
            pytest.skip(reason)
        out, lse = run(*tensors, backend=name, **options)
        return to_numpy(out), to_numpy(lse)

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        from flashtile.pytorch import run as kernel
        from flashtile.pytorch.bridge import to_numpy
        from tests.pytorch.samples import tensor

        tensors, options = given(call)
        dout, dlse, out, lse = (None if x is None else tensor(x) for x in (call.dout, call.dlse, out, lse))
        if "spans" in options:
            options["spans"] = options["spans"].limits
        grads = kernel.backward(dout, dlse, out, lse, True, *tensors, name, options)
        return ft.Grads(*(None if x is None else to_numpy(x) for x in grads))

    return Runner(name, forward, backward, refusal, same_bits=False)


def tiles_runner(order: str, block_q: int, block_k: int) -> Runner:
    def forward(call: Call) -> tuple[Any, Any]:
        problem = call.problem()
        out, lse = tiles.forward(problem, order, block_q, block_k)
        return problem.in_caller_layout(narrow(out, problem.out_dtype)), problem.in_caller_layout(lse)

    def backward(call: Call, out: Any, lse: Any) -> ft.Grads:
        problem = call.problem()
        dout, out, lse, dlse = check_gradients(problem, call.dout, out, lse, call.dlse)
        grads = tiles.backward(problem, dout, out, lse, dlse, block_q, block_k)
        dq, dk, dv = (problem.in_caller_layout(narrow(x, problem.dtype)) for x in grads[:3])
        dbias, dsink = (
            None if x is None else narrow(x, name_of(given.dtype)).reshape(given.shape)
            for x, given in ((grads.dbias, call.options.get("bias")), (grads.dsink, call.options.get("sink")))
        )
        return ft.Grads(dq, dk, dv, dbias, dsink)

    return Runner(f"tiles {order} {block_q}x{block_k}", forward, backward)


RUNNERS = (
    *((torch_runner if row.tensors_only else api_runner)(row.name) for row in dispatch.TABLE if row.device == "cpu"),
    tiles_runner("fa1", 16, 24),
    tiles_runner("fa2", 7, 50),
)


def why_missing(name: str) -> str | None:
    """Why a backend cannot run here, as the dispatch table says; None if it can."""
    for row in dispatch.TABLE:
        if row.name == name.split()[0]:
            return row.missing() if hasattr(row.load(), "prepare") else "it is not there"
    return None


def runner_param(runner: Runner) -> Any:
    """The runner as a pytest parameter, skipped with the reason if this machine lacks the backend."""
    reason = why_missing(runner.name)
    marks = [pytest.mark.skip(reason=f"{runner.name}: {reason}")] if reason else []
    return pytest.param(runner, id=runner.name, marks=marks)


every_runner = pytest.mark.parametrize("runner", [runner_param(r) for r in RUNNERS])
TENSORS_ONLY = {row.name for row in dispatch.TABLE if row.tensors_only}
every_array_runner = pytest.mark.parametrize("runner", [runner_param(r) for r in RUNNERS if r.name not in TENSORS_ONLY])
