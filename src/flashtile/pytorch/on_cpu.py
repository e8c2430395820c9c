"""Calls on a CPU: tensors seen as NumPy arrays; small ones that come again by address, straight to the C++ core."""

from __future__ import annotations

from operator import and_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashtile import dispatch
from flashtile.checks.arguments import check_seed, elements_across
from flashtile.host import threads
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import narrow
from flashtile.problem import Problem, check_lengths, describe
from flashtile.pytorch.bridge import Memory, maker, to_numpy, to_torch
from flashtile.pytorch.operands import TENSORS, number_of


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
    if isinstance(seed := options.get("seed"), Tensor):
        check_seed(seed, q)
        options["seed"] = number_of(seed)
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
    given = Inputs.of(problem)._replace(**tensors)
    return Small(core, problem, given, options.get("threads") is not None), given, True


class Whole:
    """A call for once."""

    __slots__ = ("_problem", "_row")

    def __init__(self, problem: Problem, row: dispatch.Backend) -> None:
        self._problem, self._row = problem, row

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        p = self._problem
        out, lse = self._row.forward(p, Memory)
        return given(p, out, p.out_dtype), given(p, lse, p.accumulator)

    def output(self, x: Inputs) -> Tensor:
        out, _ = self._row.forward(self._problem, Memory)
        return given(self._problem, out, self._problem.out_dtype)


class Small:
    """Calls like one that its backend has prepared, wherever their tensors lie."""

    __slots__ = ("_core", "_item", "_items", "_keys", "_lse", "_out", "_threads")
    anywhere = True

    def __init__(self, core: Any, p: Problem, x: Inputs, by_threads: bool) -> None:
        """by_threads: the call says how many; if not, torch has the last word each time."""
        self._core, self._threads, self._keys = core, p.threads if by_threads else None, p.n_k
        self._item = x.q.element_size() - 1  # the bits of an address that lies between elements
        self._items = [getattr(x, name).element_size() - 1 for name in core.others]
        if not any(self._items):  # bytes
            self._items = []
        shape = p.out_shape()[4 - p.rank :]
        self._out = maker(shape, getattr(torch, p.out_dtype))
        self._lse = maker(shape[:-1], getattr(torch, p.accumulator))

    def output(self, x: Inputs) -> Tensor:
        out: Tensor = self._out()
        self._run(x, out.data_ptr(), None)
        return out

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = self._out(), self._lse()
        self._run(x, out.data_ptr(), lse.data_ptr())
        return out, lse

    def _run(self, x: Inputs, out: int, lse: int | None) -> None:
        q, k, v = x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr()
        others = [getattr(x, name).data_ptr() for name in self._core.others] if self._core.others else ()
        if (q | k | v) & self._item or (self._items and any(map(and_, others, self._items))):
            moved: Any = {n: _between_no_elements(getattr(x, n)) for n in ("q", "k", "v", *self._core.others)}
            return self._run(x._replace(**moved), out, lse)
        lengths = () if x.kv_lengths is None else x.kv_lengths.tolist()
        if lengths and not 0 <= min(lengths) <= max(lengths) <= self._keys:
            check_lengths(np.array(lengths), self._keys)
        seed = x.seed if x.seed.__class__ is int else number_of(x.seed)
        self._core(self._threads or _threads(), seed, q, k, v, out, lse, others, lengths)
        return None


def _between_no_elements(x: Tensor) -> Tensor:
    """x, or a copy with the same strides if its address is no multiple of an element's size."""
    if not x.data_ptr() % x.element_size():
        return x
    return x.as_strided((elements_across(x),), (1,)).clone().as_strided(x.shape, x.stride())


def _threads() -> int:
    return threads.asked_for() or torch.get_num_threads()
