"""Calls on a CPU: tensors seen as NumPy arrays; small ones that come again by address, straight to the C++ core."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashtile import dispatch, threads
from flashtile.dtypes import narrow
from flashtile.inputs import Inputs
from flashtile.problem import Problem, check_lengths, describe
from flashtile.pytorch.bridge import to_numpy, to_torch
from flashtile.pytorch.call import TENSORS

_GUARDS: Any = torch._C._dynamo.guards


def chosen(q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]) -> tuple[Problem, dispatch.Backend]:
    """The call, its tensors seen as NumPy arrays, and who will run it."""
    given, options = options, options.copy()
    try:
        for name in TENSORS:
            if (x := options.get(name)) is not None:
                options[name] = to_numpy(x)
        arrays = to_numpy(q), to_numpy(k), to_numpy(v)
    except TypeError:  # a dtype that NumPy lacks
        describe(q, k, v, **given)  # says whose it is
        raise
    if options.get("threads") is None:
        options["threads"] = _threads()
    problem = describe(*arrays, **options)
    return problem, dispatch.choose(problem, backend, "cpu", tensors=True)


def given(problem: Problem, x: Any, dtype: str) -> Tensor:
    """A backend's result as a contiguous tensor in the caller's layout."""
    return to_torch(problem.as_given(narrow(x, dtype)))


def work_out(
    q: Tensor, k: Tensor, v: Tensor, backend: str, options: dict[str, Any]
) -> tuple[Small | Whole, Inputs, bool]:
    """What runs this call, the tensors to run it on, and whether it also runs others like it."""
    problem, row = chosen(q, k, v, backend, options)
    core = row.small(problem)
    if core is None:
        return Whole(problem, row), Inputs.of(problem), False
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        **{name: options[name] for name in (*core.others, "kv_lengths") if name in options},
    }
    return Small(core, problem, options.get("threads") is not None), Inputs.of(problem)._replace(**tensors), True


class Whole:
    """A call for once."""

    __slots__ = ("_problem", "_row")

    def __init__(self, problem: Problem, row: dispatch.Backend) -> None:
        self._problem, self._row = problem, row

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        p = self._problem
        out, lse = self._row.forward(p)
        return given(p, out, p.out_dtype), given(p, lse, p.accumulator)

    def output(self, x: Inputs) -> Tensor:
        out, _ = self._row.forward(self._problem)
        return given(self._problem, out, self._problem.out_dtype)


class Small:
    """Calls like one that its backend has prepared."""

    __slots__ = ("_core", "_keys", "_lse", "_out", "_threads")

    def __init__(self, core: Any, p: Problem, by_threads: bool) -> None:
        """by_threads: the call says how many; if not, torch has the last word each time."""
        self._core, self._threads, self._keys = core, p.threads if by_threads else None, p.n_k
        shape = p.out_shape()[4 - p.rank :]
        self._out, self._lse = _maker(shape, p.out_dtype), _maker(shape[:-1], p.accumulator)

    def output(self, x: Inputs) -> Tensor:
        out: Tensor = self._out()
        self._run(x, out.data_ptr(), None)
        return out

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = self._out(), self._lse()
        self._run(x, out.data_ptr(), lse.data_ptr())
        return out, lse

    def _run(self, x: Inputs, out: int, lse: int | None) -> None:
        others = [getattr(x, name).data_ptr() for name in self._core.others] if self._core.others else ()
        lengths = () if x.kv_lengths is None else x.kv_lengths.tolist()
        if lengths and not 0 <= min(lengths) <= max(lengths) <= self._keys:
            check_lengths(np.array(lengths), self._keys)
        given = x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr()
        self._core(self._threads or _threads(), x.seed, *given, out, lse, others, lengths)


def _threads() -> int:
    return threads.asked_for() or torch.get_num_threads()


def _maker(shape: tuple[int, ...], dtype: str) -> Any:
    """What makes such tensors, contiguous, past the dispatcher."""
    return partial(_GUARDS._empty_strided_cpu, shape, torch.empty(shape, device="meta").stride(), getattr(torch, dtype))
