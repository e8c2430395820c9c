"""Problem: a frozen description of one checked call, which every backend reads."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashtile.band import Band
from flashtile.checks import options as checks
from flashtile.checks.keywords import check_keywords
from flashtile.checks.options import is_tensor
from flashtile.checks.shapes import check_dtypes, check_shapes, rank4
from flashtile.errors import ShapeError
from flashtile.host.memory_order import Order, order_of
from flashtile.numerics.dtypes import accumulator
from flashtile.numerics.visibility import Visibility, Visible
from flashtile.options import OPTIONS

# The options as fields; causal, window and band become one.
if TYPE_CHECKING:
    _Options = Any
else:
    _NAMES = [name for name in OPTIONS if name not in ("causal", "window", "band")]
    _Options = make_dataclass("_Options", _NAMES, frozen=True, slots=True, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(_Options):  # type: ignore[misc]
    """One attention call. Arrays are views of rank 4, (batch, heads, length, dim); packed ones have batch 1.

    Every option is a field with its checked value: mask and bias have rank 4, each axis full or 1; spans are limits of
    rank 5; alibi has shape (sequences or 1, heads), sink (heads,), descale (sequences or 1, kv_heads or 1, 3). A seed
    may be a tensor. An origin has its number of heads.
    """

    q: Any
    k: Any
    v: Any
    sequences: int  # the batch, or the number of packed sequences
    heads: int
    kv_heads: int
    n_q: int  # queries of the longest sequence
    n_k: int
    dim: int
    dim_v: int
    dtype: str
    rank: int  # of the caller's q
    band: Band  # its offset counts only if align_end is False
    align_end: bool  # align the last query of a sequence with its last key
    changed: tuple[str, ...]  # names of options that differ from their defaults

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def accumulator(self) -> str:
        return accumulator(self.dtype)

    @property
    def q_lengths(self) -> list[int]:
        """Queries of each sequence."""
        return [self.n_q] * self.sequences if self.cu_q is None else np.diff(self.cu_q).tolist()

    @property
    def k_lengths(self) -> list[int]:
        """Keys in use of each sequence."""
        if self.kv_lengths is not None:
            return [int(n) for n in self.kv_lengths]
        return [self.n_k] * self.sequences if self.cu_k is None else np.diff(self.cu_k).tolist()

    def band_for(self, n_q: int, n_k: int) -> Band:
        """The band of a sequence with n_q queries and n_k keys."""
        return Band(self.band.left, self.band.right, n_k - n_q) if self.align_end else self.band

    def visible(self, band: Band, sequence: int, head: int, n_q: int) -> Visible:
        """What the n_q queries of a head see: its band, with the spans if there are any."""
        if self.spans is None:
            return band
        s, h = (n if size > 1 else 0 for n, size in zip((sequence, head), self.spans.shape, strict=False))
        return Visibility(band, self.spans[s, h, :n_q])

    def out_shape(self) -> tuple[int, ...]:
        """The rank-4 shape of the output; that of the lse lacks the last axis."""
        return (*self.q.shape[:3], self.dim_v)

    def order_of(self, x: Any, less: Callable[..., bool] = operator.lt) -> Order:
        """The order in memory of the axes of q, k or v, rank 4, but the last. Results have that of their input."""
        strides = [*map(abs, x.strides)] if isinstance(x, np.ndarray) else x.stride()
        return order_of(x.shape, strides, self.packed, less)

    def in_caller_layout(self, x: Any) -> Any:
        """Return a rank-4 result, or a rank-3 lse, in the caller's layout."""
        if self.packed:
            return x[0].swapaxes(0, 1)
        for _ in range(4 - self.rank):
            x = x[0]
        return x


def describe(q: Any, k: Any, v: Any, **options: Any) -> Problem:
    """Check and describe one call. Reads values of NumPy arrays, but only metadata of torch and fake tensors."""
    check_keywords("attention", options, OPTIONS)
    dtype = check_dtypes(q, k, v)
    rank = len(q.shape)
    cu_q, cu_k = options.get("cu_q"), options.get("cu_k")
    packed = cu_q is not None or cu_k is not None
    if packed or not rank == len(k.shape) == len(v.shape) == 4:
        q, k, v = (rank4(name, x, rank, packed) for name, x in (("q", q), ("k", k), ("v", v)))
    sequences, heads, n_q, dim = q.shape
    _, kv_heads, n_k, dim_v = v.shape
    check_shapes(q, k, v, packed)
    if packed:
        cu_q, n_q = checks.starts("cu_q", cu_q, n_q)
        cu_k, n_k = checks.starts("cu_k", cu_k, n_k)
        sequences = cu_q.shape[0] - 1
        if cu_k.shape[0] != cu_q.shape[0]:
            raise ShapeError(f"cu_k: expected as many entries as cu_q ({cu_q.shape[0]}), got {cu_k.shape[0]}")
    shapes = checks.Shapes(q, dtype, sequences, heads, kv_heads, n_q, n_k, cu_q, cu_k)
    values = {name: x.check(name, options.get(name, x.default), shapes) for name, x in OPTIONS.items()}
    values |= {"cu_q": cu_q, "cu_k": cu_k}
    values["band"], align_end = checks.combine_bands(values.pop("causal"), values.pop("window"), values["band"])
    if values["scale"] is None:
        values["scale"] = dim**-0.5
    checks.check_scale_and_softcap(values["scale"], values["softcap"], accumulator(dtype))
    return Problem(
        q=q,
        k=k,
        v=v,
        sequences=sequences,
        heads=heads,
        kv_heads=kv_heads,
        n_q=n_q,
        n_k=n_k,
        dim=dim,
        dim_v=dim_v,
        dtype=dtype,
        rank=rank,
        align_end=align_end,
        changed=tuple(
            name for name in OPTIONS if options.get(name) is not None and not _is_default(name, options[name])
        ),
        **values,
    )


def _is_default(name: str, x: Any) -> bool:
    return not OPTIONS[name].array and not is_tensor(x) and bool(x == OPTIONS[name].default)
