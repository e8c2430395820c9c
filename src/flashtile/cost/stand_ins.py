"""Arrays that stand for those of a call which is only planned: shapes and dtypes that take no memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashtile.checks.arguments import check_shape, to_host
from flashtile.checks.options import is_tensor
from flashtile.numerics.dtypes import EIGHT_BITS, ITEMSIZE, Array, accumulator, carrier
from flashtile.options import OPTIONS
from flashtile.problem import Problem
from flashtile.spans import limits_of


def stand_ins(options: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The options of a call of this dtype, shapes replaced by arrays that have them."""
    like_q = accumulator(dtype) if dtype == EIGHT_BITS else dtype
    found: dict[str, Any] = {}
    for name, x in options.items():
        kind = OPTIONS[name].array
        if kind == "factors" or (name == "seed" and is_tensor(x)):
            continue  # values that change nothing in a plan, and may be on a GPU
        if kind in ("bool", "like q") and isinstance(x, tuple | list):
            x = stand_in(check_shape(name, x), "bool" if kind == "bool" else like_q)
        elif kind == "limits":
            x = to_host(name, limits_of(x))
        elif kind == "integers":
            x = to_host(name, x)
        found[name] = x
    return found


def stand_in(shape: Sequence[int], dtype: str) -> Array:
    """An array of any size in a few bytes: every element is the same zero."""
    zero: Array = np.zeros((), np.bool_ if dtype == "bool" else carrier(dtype))
    return np.broadcast_to(zero, tuple(shape))


@dataclass(frozen=True, slots=True)
class Outline:
    """A contiguous tensor without memory, for backends that inspect tensors through torch's methods."""

    shape: tuple[int, ...]
    itemsize: int

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.itemsize

    def stride(self, axis: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[n + 1 :]) for n in range(len(self.shape)))
        return strides if axis is None else strides[axis]

    def data_ptr(self) -> int:
        return 0


def outlined(problem: Problem) -> Problem:
    """The problem with outlines of tensors for q, k and v."""
    q, k, v = (Outline(x.shape, ITEMSIZE[problem.dtype]) for x in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v)
