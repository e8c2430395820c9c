"""Inputs: what may change between calls of one runner: the arrays, and the seed of dropout."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flashtile.options import ARRAYS
from flashtile.problem import Problem

TENSORS = ("q", "k", "v", *ARRAYS)
_of = attrgetter(*TENSORS, "seed")

if TYPE_CHECKING:
    _Fields = Any
else:
    _Fields = namedtuple("_Fields", (*TENSORS, "seed"))


class Inputs(_Fields):  # type: ignore[misc]
    """q, k, v, the arrays among the options, and the seed: a number, or a tensor that only kernels read.

    The arrays may be the caller's or a Problem's views of them: a runner knows their layout already.
    """

    __slots__ = ()

    @classmethod
    def of(cls, p: Problem) -> Inputs:
        return inputs(_of(p))


inputs = partial(tuple.__new__, Inputs)  # from an iterable, in half the time of Inputs._make()
NO_ARRAYS = (None,) * len(ARRAYS)
