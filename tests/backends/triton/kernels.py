"""The Triton kernels on a call of the grid: on a GPU where there is one, else under Triton's interpreter.

backend: whose prepare() is asked, that of the portable kernels unless one says otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashtile as ft
from flashtile.dtypes import BFLOAT16, name_of, narrow
from flashtile.inputs import Inputs
from flashtile.problem import Problem, describe
from tests.grid import Call

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flashtile.backends import triton as portable  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(x: Any) -> Any:
    """A NumPy array of a call as a tensor; anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.copy().view(np.uint16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(x.copy()).to(DEVICE)


def array(x: Any) -> Any:
    x = x.cpu()
    return x.view(torch.uint16).numpy().view(BFLOAT16) if x.dtype is torch.bfloat16 else x.numpy()


def problem_of(call: Call) -> Problem:
    options = {name: tensor(x) for name, x in {**call.options, **call.packed}.items()}
    return describe(tensor(call.q), tensor(call.k), tensor(call.v), **options)


def forward(call: Call, backend: Any = portable) -> tuple[Any, Any]:
    run, problem = backend.prepare(problem_of(call))
    out, lse = run.forward(Inputs.of(problem))
    return array(out), array(lse)


def backward(call: Call, out: Any, lse: Any, backend: Any = portable) -> ft.Grads:
    run, problem = backend.prepare(problem_of(call))
    grads = run.backward(Inputs.of(problem), *map(tensor, (call.dout, out, lse, call.dlse)))
    dq, dk, dv = (array(x) for x in grads[:3])
    dbias, dsink = (
        None if x is None else narrow(array(x), name_of(like.dtype)).reshape(like.shape)
        for x, like in ((grads.dbias, call.options.get("bias")), (grads.dsink, call.options.get("sink")))
    )
    return ft.Grads(dq, dk, dv, dbias, dsink)
