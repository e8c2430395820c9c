"""Tensors of a launch: outlines without memory, results to be allocated, descriptors for the copy engine."""

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
from flashtile.host.memory_order import MAX_ROW_STRIDE, axes_of_caller, strides_of
from flashtile.problem import Problem

FEW_ROWS = 512  # for which a descriptor does not pay
DISCARDED = 1 << 16  # elements: larger unused results have memory of their own
_GUARDS: Any = torch._C._dynamo.guards
_discard_buffers: dict[Any, Any] = {}


def laid_out(p: Problem) -> Problem:
    """The problem with rows and vectors laid out as kernels need them; p itself if they are already."""
    vectors = ("sink", "kv_lengths", "cu_q", "cu_k", "descale")
    copies = {name: _dense(p, x) for name in ("q", "k", "v") if not is_tidy(x := getattr(p, name), -2)}
    copies |= {
        name: x.contiguous() for name in vectors if (x := getattr(p, name)) is not None and not x.is_contiguous()
    }
    if p.dtype == "float64" and p.mask is not None:  # Triton 3.6 cannot multiply doubles that depend on a byte
        copies["mask"] = p.mask.to(torch.int64)
    return replace(p, **copies) if copies else p


def _dense(p: Problem, x: Any) -> Any:
    """A dense copy of q, k or v, rank 4, in the same order of axes, which results take from it."""
    return torch.empty_strided(x.shape, strides_of(x.shape, p.order_of(x)), dtype=x.dtype, device=x.device).copy_(x)


def is_tidy(x: Any, rows: int) -> bool:
    """Whether the columns of x are contiguous, and its rows, along this axis, are not too far apart."""
    return bool(x.ndim < 2 or (x.stride(-1) == 1 and x.stride(rows) < MAX_ROW_STRIDE))


def tidy(x: Any, rows: int) -> Any:
    """x, or a contiguous copy if it is not tidy."""
    return x if is_tidy(x, rows) else x.contiguous()


def tidy_gradients(p: Problem, dout: Any, out: Any, lse: Any, dlse: Any) -> tuple[Any, Any, Any, Any]:
    """Copy what has rows that kernels cannot take; all in the caller's layout. Wrong ranks pass through."""
    rows, alone = (0, 0) if p.packed else (-2, -1)
    lse, dlse = (
        x if x is None or x.ndim < 1 or x.stride(alone) < MAX_ROW_STRIDE else x.contiguous() for x in (lse, dlse)
    )
    return tidy(dout, rows), tidy(out, rows), lse, dlse


def rounded(dout: Any, dtype: Any) -> Any:
    """A contiguous copy in the dtype of 16-bit inputs, which the matrix units need.

    By default torch would keep the order of axes of an expanded tensor, and that of a view may differ.
    """
    return dout.to(dtype, memory_format=torch.contiguous_format)


def rounded_outline(dout: Any, p: Problem) -> Any:
    """The outline, of rank 4, of rounded() in the caller's layout; dout itself if it has the dtype of q."""
    if dout.dtype == p.q.dtype:
        return dout
    return rounded(dout.swapaxes(1, 2), p.q.dtype).swapaxes(1, 2) if p.packed else rounded(dout, p.q.dtype)


def outline(x: Any) -> Any:
    """The shape, strides and dtype of a tensor, without its memory."""
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def aligned(x: Any) -> bool:
    """Whether the pointer is a multiple of 16 bytes; Triton specializes kernels on that."""
    return bool(x.data_ptr() % 16 == 0)


def strides(x: Any, p: Problem) -> tuple[int, int, int]:
    """The strides of x (rank 4) or an lse (rank 3) for kernels: packed sequences have a sequence stride of 0."""
    return 0 if p.packed else x.stride(0), x.stride(1), x.stride(2)


def count_tiles(p: Problem, rows: int, total: int, block_rows: int) -> int:
    """The number of tiles along the rows. A packed sequence may begin within a tile, and so may need one more."""
    return total // block_rows + p.sequences if p.packed and total else int(triton.cdiv(rows, block_rows))


def empty(shape: tuple[int, ...], dtype: Any, device: Any, strides: tuple[int, ...] | None = None) -> Callable[[], Any]:
    """Return what allocates tensors like this, contiguous without strides; given strides save torch work in each call.

    On a GPU, which then has to be the current one, it skips the dispatcher too, as torch's own compiler does, if this
    torch has the function for that.
    """
    strides = torch.empty(shape, device="meta").stride() if strides is None else strides
    if device.type == "cuda" and torch.version.cuda is not None and hasattr(_GUARDS, "_empty_strided_cuda"):
        return partial(_GUARDS._empty_strided_cuda, tuple(shape), strides, dtype)
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def discard_buffer(dtype: Any, device: Any) -> Any:
    """Memory that any launch on any stream may write to, because none reads it. Graphs keep pointers to it for ever."""
    # A graph that is captured before any other call gets a buffer of its own.
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.empty(DISCARDED, dtype=dtype, device=device)
    made, _ = permanent.zeros((DISCARDED,), dtype, device)
    return _discard_buffers.setdefault((dtype, device), made)  # a second buffer would be freed while in use


class Result:
    """A result of a pass, dense in the caller's layout: in the order of its input in memory, or contiguous without one.

    like: q, k or v, rank 4.
    """

    __slots__ = ("_strides", "device", "discarded", "dtype", "empty", "numel", "shape", "strides")

    def __init__(
        self, p: Problem, heads: int, n: int, dim: int | None, dtype: str, device: Any, like: Any = None
    ) -> None:
        contiguous = (0, 2, 1) if p.packed else (0, 1, 2)
        whole = (p.q.shape[0], heads, n, 1 if dim is None else dim)
        strides = strides_of(whole, contiguous if like is None else p.order_of(like))
        axes = axes_of_caller(p.rank, p.packed)[: None if dim is not None else -1]
        self.shape, self._strides = tuple(whole[axis] for axis in axes), tuple(strides[axis] for axis in axes)
        self.strides = (0 if p.packed else strides[0], strides[1], strides[2])
        self.numel = torch.Size(self.shape).numel()
        self.dtype, self.device = getattr(torch, dtype), device
        self.empty = empty(self.shape, self.dtype, device, self._strides)  # allocates the tensor
        self.discarded: Any = None  # what discard_buffer() found, if it is kept for good

    def discard_buffer(self) -> Any:
        """Memory for a result that is not used: like empty(), but free of cost if it is small."""
        if self.numel > DISCARDED:
            return self.empty()
        self.discarded = _discard_buffers.get((self.dtype, self.device))
        return discard_buffer(self.dtype, self.device) if self.discarded is None else self.discarded

    def parts(self, *count: int, dtype: Any) -> Callable[[], Any]:
        """Return what allocates memory for this many of this result, one after the other."""
        return empty((*count, *self.shape), dtype, self.device)


def descriptor_maker(x: Any, is_aligned: bool, config: Config, rows: int) -> Callable[[Any], Any] | None:
    """Return what makes descriptors of tensors laid out like x (rank 4), for blocks of `rows` rows.

    None unless the tuning table asks for descriptors, x is long enough for them to pay, and the copy engine can take
    it: contiguous columns, and all other strides multiples of 16 bytes.
    """
    item = x.element_size()
    fits = is_aligned and x.stride(3) == 1 and all(s and s * item % 16 == 0 for s in x.stride()[:3])
    if not (config.descriptors and fits and x.shape[2] > FEW_ROWS and x.numel()):
        return None
    return maker_like(TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block(x.shape[3])]))


def maker_like(descriptor: Any) -> Callable[[Any], Any]:
    """Return what makes a copy of this descriptor for another tensor, without repeating its checks."""
    kind: Any = type(descriptor)
    like = vars(descriptor)

    def make(tensor: Any) -> Any:
        made = kind.__new__(kind)
        made.__dict__.update(like, base=tensor)
        return made

    return make


def results(p: Problem, device: Any, dtype: str | None = None) -> tuple[Result, Result, Result]:
    """dQ, dK and dV, in the dtype of q or in this one."""
    dtype = dtype or p.dtype
    n_rows, n_keys = p.q.shape[2], p.k.shape[2]
    return (
        Result(p, p.heads, n_rows, p.dim, dtype, device, p.q),
        Result(p, p.kv_heads, n_keys, p.dim, dtype, device, p.k),
        Result(p, p.kv_heads, n_keys, p.dim_v, dtype, device, p.v),
    )
