"""The Triton kernels on a call of the grid: on a GPU if there is one, else under Triton's interpreter.

backend: the row of the dispatch table that prepares the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile import dispatch
from flashtile.numerics.dtypes import BFLOAT16, name_of, narrow
from flashtile.problem import Problem, describe
from tests.support.grid import Call

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(x: Any) -> Any:
    """A NumPy array of a call as a tensor with the same order of axes in memory; anything else as it is."""
    if isinstance(x, ft.Spans):
        return ft.Spans.of(tensor(x.limits))
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.copy("K").view(np.uint16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(x.copy("K")).to(DEVICE)


def array(x: Any) -> Any:
    x = x.cpu()
    return x.view(torch.uint16).numpy().view(BFLOAT16) if x.dtype is torch.bfloat16 else x.numpy()


def problem_of(call: Call) -> Problem:
    options = {name: tensor(x) for name, x in {**call.options, **call.packed}.items()}
    return describe(tensor(call.q), tensor(call.k), tensor(call.v), **options)


def forward(call: Call, backend: str = "triton") -> tuple[Any, Any]:
    run, inputs = dispatch.named(backend).prepare(problem_of(call))
    out, lse = run.forward(inputs)
    return array(out), array(lse)


def backward(call: Call, out: Any, lse: Any, backend: str = "triton") -> ft.Grads:
    run, inputs = dispatch.named(backend).prepare(problem_of(call))
    grads = run.backward(inputs, *map(tensor, (call.dout, out, lse, call.dlse)))
    dq, dk, dv = (array(x) for x in grads[:3])
    dbias, dsink = (
        None if x is None else narrow(array(x), name_of(like.dtype)).reshape(like.shape)
        for x, like in ((grads.dbias, call.options.get("bias")), (grads.dsink, call.options.get("sink")))
    )
    return ft.Grads(dq, dk, dv, dbias, dsink)
