"""Tensors as a launch sees them: outlines that hold no memory, results to be made, blocks for the copy engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from flashtile.backends.gpu import permanent
from flashtile.backends.gpu.arguments import block
from flashtile.backends.gpu.config import Config
from flashtile.problem import Problem

FEW_ROWS = 512
FARTHEST = 1 << 23  # elements: offsets within a tile, of 256 rows at most, have 32 bits
DISCARDED = 1 << 16  # elements: larger results that nobody wants have memory of their own
_GUARDS: Any = torch._C._dynamo.guards
_discard_buffers: dict[Any, Any] = {}


def laid_out(p: Problem) -> Problem:
    """The problem with rows and vectors as kernels want them; p itself where it has them."""
    vectors = ("sink", "kv_lengths", "cu_q", "cu_k", "descale")
    copies = {name: y for name in ("q", "k", "v") if (y := tidy(x := getattr(p, name), -2)) is not x}
    copies |= {
        name: x.contiguous() for name in vectors if (x := getattr(p, name)) is not None and not x.is_contiguous()
    }
    if p.dtype == "float64" and p.mask is not None:  # Triton 3.6 cannot multiply doubles that depend on a byte
        copies["mask"] = p.mask.to(torch.int64)
    return replace(p, **copies) if copies else p


def tidy(x: Any, rows: int) -> Any:
    """x, or a copy where its columns are not side by side, or its rows, along this axis, too far apart."""
    return x if x.ndim < 2 or (x.stride(-1) == 1 and x.stride(rows) < FARTHEST) else x.contiguous()


def tidy_gradients(p: Problem, dout: Any, out: Any, lse: Any, dlse: Any) -> tuple[Any, Any, Any, Any]:
    """What a backward pass is given, in the caller's layout, with rows as kernels want them; wrong ranks stay."""
    rows, alone = (0, 0) if p.packed else (-2, -1)
    lse, dlse = (x if x is None or x.ndim < 1 or x.stride(alone) < FARTHEST else x.contiguous() for x in (lse, dlse))
    return tidy(dout, rows), tidy(out, rows), lse, dlse


def rounded(dout: Any, dtype: Any) -> Any:
    """A copy as the matrix units take it, beside inputs of 16 bits; contiguous.

    Left to itself torch goes by the order of the axes where elements share memory, and that of a view is another.
    """
    return dout.to(dtype, memory_format=torch.contiguous_format)


def rounded_outline(dout: Any, p: Problem) -> Any:
    """The outline of such a copy, of rank 4, made in the caller's layout; dout itself where it has the dtype of q."""
    if dout.dtype == p.q.dtype:
        return dout
    return rounded(dout.swapaxes(1, 2), p.q.dtype).swapaxes(1, 2) if p.packed else rounded(dout, p.q.dtype)


def outline(x: Any) -> Any:
    """The shape, strides and dtype of a tensor, without its memory."""
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def aligned(x: Any) -> bool:
    """Triton compiles one kernel for pointers that are multiples of 16 bytes, and another for those that are not."""
    return bool(x.data_ptr() % 16 == 0)


def strides(x: Any, p: Problem) -> tuple[int, int, int]:
    """Of x of rank 4, or an lse of rank 3, as kernels count them: packed sequences begin where their rows do."""
    return 0 if p.packed else x.stride(0), x.stride(1), x.stride(2)


def count_tiles(p: Problem, rows: int, total: int, block_rows: int) -> int:
    """Tiles along the rows. Packed sequences may begin within a tile, so each of them may need one more."""
    return total // block_rows + p.sequences if p.packed and total else int(triton.cdiv(rows, block_rows))


def empty(shape: tuple[int, ...], dtype: Any, device: Any) -> Callable[[], Any]:
    """What makes contiguous tensors like this: with strides given, torch has less to work out each time.

    On a GPU, which then has to be the current one, it is spared the dispatcher too, as by torch's own compiler,
    where this torch has what that takes.
    """
    strides = torch.empty(shape, device="meta").stride()
    if device.type == "cuda" and torch.version.cuda is not None and hasattr(_GUARDS, "_empty_strided_cuda"):
        return partial(_GUARDS._empty_strided_cuda, tuple(shape), strides, dtype)
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def discard_buffer(dtype: Any, device: Any) -> Any:
    """Memory that all launches may write to, on whichever stream, because none reads it. Graphs rely on it for ever."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # a graph before any call has it for itself
        return torch.empty(DISCARDED, dtype=dtype, device=device)
    made, _ = permanent.zeros((DISCARDED,), dtype, device)
    return _discard_buffers.setdefault((dtype, device), made)  # not a second one, which would be given up while in use


class Result:
    """A tensor that a pass makes, contiguous in the caller's layout."""

    __slots__ = ("device", "dtype", "empty", "numel", "shape", "strides")

    def __init__(self, p: Problem, heads: int, n: int, dim: int | None, dtype: str, device: Any) -> None:
        last = () if dim is None else (dim,)
        width = 1 if dim is None else dim
        self.shape = (n, heads, *last) if p.packed else (p.q.shape[0], heads, n, *last)[4 - p.rank :]
        self.strides = (0, width, heads * width) if p.packed else (heads * n * width, n * width, width)
        self.numel = torch.Size(self.shape).numel()
        self.dtype, self.device = getattr(torch, dtype), device
        self.empty = self.parts(dtype=self.dtype)  # called, it makes the tensor

    def discard_buffer(self) -> Any:
        """A place for the result where nobody wants it: as empty(), but a small one costs nothing."""
        if self.numel > DISCARDED:
            return self.empty()
        found = _discard_buffers.get((self.dtype, self.device))
        return discard_buffer(self.dtype, self.device) if found is None else found

    def parts(self, *count: int, dtype: Any) -> Callable[[], Any]:
        """What makes the same a number of times, along another axis."""
        return empty((*count, *self.shape), dtype, self.device)


def descriptor_maker(x: Any, is_aligned: bool, config: Config, rows: int) -> Callable[[Any], Any] | None:
    """What makes a descriptor of tensors that lie like x, of rank 4, for blocks of so many rows.

    None unless the table asks for descriptors, x is long enough to be worth their making, and the copy engine can take
    it: all strides but the columns' multiples of 16 bytes.
    """
    item = x.element_size()
    fits = is_aligned and x.stride(3) == 1 and all(s and s * item % 16 == 0 for s in x.stride()[:3])
    if not (config.descriptors and fits and x.shape[2] > FEW_ROWS and x.numel()):
        return None
    return maker_like(TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block(x.shape[3])]))


def maker_like(descriptor: Any) -> Callable[[Any], Any]:
    """What makes a descriptor like this one, whose checks have been made, of another tensor."""
    kind: Any = type(descriptor)
    like = vars(descriptor)

    def make(tensor: Any) -> Any:
        made = kind.__new__(kind)
        made.__dict__.update(like, base=tensor)
        return made

    return make


def results(p: Problem, device: Any) -> tuple[Result, Result, Result]:
    """dQ, dK and dV."""
    n_rows, n_keys = p.q.shape[2], p.k.shape[2]
    return (
        Result(p, p.heads, n_rows, p.dim, p.dtype, device),
        Result(p, p.kv_heads, n_keys, p.dim, p.dtype, device),
        Result(p, p.kv_heads, n_keys, p.dim_v, p.dtype, device),
    )
