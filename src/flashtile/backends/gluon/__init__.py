"""Warp-specialised Hopper kernels in Gluon, forward and backward, faster than what Triton schedules by itself."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from flashtile.backends import gpu
from flashtile.cost.tiling import Tiling
from flashtile.inputs import Inputs
from flashtile.numerics.dtypes import EIGHT_BITS
from flashtile.problem import Problem

if TYPE_CHECKING:
    from flashtile.backends.gluon.passes import Runner

MAJOR = 9  # compute capability
RELEASES = ("3.6",)  # of Triton with which all GPU tests have passed; Gluon changes in each, see compatibility.py
MAX_HEAD_DIM = 256
MAX_ROWS = 1 << 30
FEW_QUERIES = 64
ROWS_TO_FILL = 64 * 128  # about two tiles for three processors in four
SMALL_HEAD_DIM, FEW_KEYS = 64, 1024  # up to which the portable kernels run in one wave, see suits()
FEW_TILES = 16
MAX_SOFTCAP = 1 << 13  # times the absolute error of its tanh, that of float32 near 1, it is a thousandth


@cache
def missing() -> str | None:
    """Why these kernels cannot run on this machine; None if they can."""
    reason = gpu.missing()
    if reason is not None:
        return reason
    import torch
    import triton

    if ".".join(triton.__version__.split(".")[:2]) not in RELEASES:
        return f"it has been tested with Triton {' and '.join(RELEASES)}, and this is {triton.__version__}"
    reasons = [_not_hopper(torch.cuda.get_device_capability(n)) for n in range(torch.cuda.device_count())]
    return None if None in reasons else reasons[0]


def _not_hopper(capability: tuple[int, int]) -> str | None:
    major, minor = capability
    if major == MAJOR:
        return None
    return f"it needs a Hopper GPU (compute capability {MAJOR}), this one has {major}.{minor}"


def why_not(problem: Problem) -> str | None:
    """Why this problem is left to the portable kernels. Its GPU may be another one than the machine's Hopper GPU."""
    p = problem
    device = getattr(p.q, "device", None)  # the tensors of a plan have no device
    if getattr(device, "type", None) == "cuda":
        import torch

        reason = _not_hopper(torch.cuda.get_device_capability(device))
        if reason is not None:
            return reason
    if p.dtype not in ("float16", "bfloat16", EIGHT_BITS):
        return f"it takes float16, bfloat16 and {EIGHT_BITS}, not {p.dtype}"
    if p.packed and p.dtype == EIGHT_BITS:
        return f"it takes no packed sequences of {EIGHT_BITS}"
    if max(p.dim, p.dim_v) > MAX_HEAD_DIM:
        return f"its tiles hold head dims up to {MAX_HEAD_DIM}"
    if p.scale <= 0:
        return "it takes a positive scale"
    if p.softcap > MAX_SOFTCAP:
        return f"its softcap is exact up to {MAX_SOFTCAP}"
    for name in "qkv":
        x = getattr(p, name)
        if not x.numel():
            return f"{name} is empty"
        if not fetchable(x):
            return f"{name}: the copy engine needs contiguous columns, and other strides in multiples of 16 bytes"
    if p.n_q * p.heads * p.sequences > MAX_ROWS:
        return f"it counts rows in 32 bits: there are more than {MAX_ROWS}"
    return gpu.why_not(problem)


def suits(problem: Problem) -> bool:
    """Whether there is enough work for a kernel that takes every processor for itself.

    The portable kernels split the keys of few queries, and start sooner; but 8-bit tensors are widened for them. At
    head dim 64 they compute ROWS_TO_FILL rows at once, a tile per processor, in a single launch.
    """
    if problem.dtype == EIGHT_BITS:
        tiling = tile(problem)
        heads = problem.heads // tiling.heads * problem.sequences
        return -(-problem.n_q // tiling.rows) * heads >= FEW_TILES
    rows = problem.n_q * problem.heads * problem.sequences
    at_once = max(problem.dim, problem.dim_v) <= SMALL_HEAD_DIM and problem.n_k <= FEW_KEYS
    return problem.n_q > FEW_QUERIES and (rows > ROWS_TO_FILL if at_once else rows >= ROWS_TO_FILL)


def tile(problem: Problem, capability: tuple[int, int] | None = None) -> Tiling:
    """The tile of a forward pass."""
    from flashtile.backends.gluon import tuning

    heads = tuning.packed_heads(problem)
    config = tuning.forward_of(problem, heads)
    return Tiling(tuning.ROWS * config.consumers // heads, config.block_k, heads)


def prepare(problem: Problem, arrays: Any = None) -> tuple[Runner, Inputs]:
    """Prepare the launches of this problem, and return them with its inputs, laid out as they need them."""
    from flashtile.backends.gluon.passes import Runner
    from flashtile.backends.gpu.tensors import laid_out

    p = laid_out(problem)
    return Runner(p, reusable=p is problem), Inputs.of(p)


def supports_backward(problem: Problem) -> bool:
    """Whether the backward kernels support this problem; if not, the portable kernels compute the gradients."""
    from flashtile.backends.gluon import tuning

    p, width = problem, max(problem.dim, problem.dim_v)
    if width > 128 and p.softcap:  # one warpgroup computes the scores, and the other one would need softcap's slope
        return False
    return width <= tuning.WIDEST_BACKWARD and p.dim % 8 == p.dim_v % 8 == 0


def fetchable(x: Any) -> bool:
    """Whether the copy engine can take x, of rank 4."""
    item = x.element_size()
    apart = all(n == 1 or (s > 0 and s * item % 16 == 0) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True))
    return bool(x.stride(3) == 1 and apart and x.data_ptr() % 16 == 0)
