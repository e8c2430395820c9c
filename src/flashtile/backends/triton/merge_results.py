"""merge() of tensors on a GPU, by one kernel."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from flashtile.backends.gpu import device as gpu
from flashtile.backends.triton.merge_results_kernel import merge_results_kernel

MAX_RESULTS = 8  # the kernel is compiled for their number
MAX_WIDTH = 1024
BLOCK = 4096  # numbers of a result that a program has in registers
AXES = 3


def merge(results: tuple[Any, ...], into: tuple[Any, Any]) -> bool:
    """Merge results, given as out, lse, out, lse, ..., into two tensors, which may be among them.

    Returns False if the kernel does not take that many, so wide, or along so many axes.
    """
    out, count = into[0], len(results) // 2
    width = out.shape[-1]
    arrays = (*(x.contiguous() if n % 2 == 0 and x.stride(-1) != 1 else x for n, x in enumerate(results)), *into)
    shape, strides = fold(tuple(out.shape[:-1]), [tuple(x.stride()[: out.ndim - 1]) for x in arrays])
    if len(shape) > AXES or count > MAX_RESULTS or width > MAX_WIDTH:
        return False
    rows, missing = prod(shape), AXES - len(shape)
    if not rows:
        return True
    _, n_1, n_2 = (1,) * missing + shape
    is_wide = count > 2 or any(x.dtype is torch.float64 for x in arrays)
    block_d = min(triton.next_power_of_2(max(width, 1)), 256)
    block_r = min(max(1, BLOCK // block_d), triton.next_power_of_2(rows))
    grid = (triton.cdiv(rows, block_r),)
    flat = tuple(n for x in strides for n in (0,) * missing + x)
    sizes = {"COUNT": count, "WIDTH": width, "BLOCK_R": block_r, "BLOCK_D": block_d}
    real = tl.float64 if is_wide else tl.float32
    launch = merge_results_kernel[grid]
    gpu.on_device(gpu.index_of(out.device), lambda: launch(arrays, flat, rows, n_1, n_2, **sizes, REAL=real))
    return True


def fold(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Fold neighbouring axes into one wherever they lie as one in every array."""
    axes: list[tuple[int, tuple[int, ...]]] = []  # the length of each folded axis, and its stride in each array
    for n, steps in zip(shape, zip(*strides, strict=True), strict=True):
        if n == 1:
            continue
        if axes and all(outer == n * inner for outer, inner in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = axes[-1][0] * n, steps
        else:
            axes.append((n, steps))
    return tuple(n for n, _ in axes), [tuple(steps[i] for _, steps in axes) for i in range(len(strides))]
