"""Whether elements share memory, within an array or between two: for arrays that a call writes to."""

from typing import Any

import numpy as np

from flashtile.numerics.dtypes import Array

EFFORT = 10_000  # of NumPy's search for an element that two arrays share; beyond it they count as overlapping


def overlap(x: Array, y: Array) -> bool:
    """Whether two arrays may share an element. They may be views of any device's memory, which is not read."""
    return np.may_share_memory(x, y, max_work=EFFORT)


def overlaps_itself(shape: Any, strides: Any, width: int) -> bool:
    """Whether two elements may share memory: an axis steps less far than those within it reach.

    width: of an element, in the unit of the strides.
    """
    reach = width
    for step, n in sorted((abs(step), n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step < reach:
            return 0 not in shape
        reach += step * (n - 1)
    return False
