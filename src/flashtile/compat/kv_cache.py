"""A KV cache that grows in place, contiguous or paged, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.errors import DTypeError, ShapeError, UnsupportedError
from flashtile.pytorch.interception import check_storage, readable
from flashtile.spans import Spans


class Cache(NamedTuple):
    """The part of a KV cache that belongs to the sequences of a call.

    keys, values: (slots, rows, heads, dim), the slot of each sequence in `slots`; or (pages, rows of a page, heads,
    dim), the pages of each sequence in `table`. lengths: the rows in use of each sequence.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    slots: Tensor | None
    table: Tensor | None

    @property
    def capacity(self) -> int:
        """The most rows a sequence can have."""
        return _capacity(self.keys, self.table)

    def gather(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (batch, capacity, heads, dim): a copy if they are paged or indexed."""
        if self.table is not None:
            return gather_pages(self.keys, self.table), gather_pages(self.values, self.table)
        slots = slice(self.lengths.shape[0]) if self.slots is None else self.slots.long()
        return self.keys[slots], self.values[slots]

    def append(self, k: Tensor, v: Tensor) -> Cache:
        """Write new rows after those in use, and return the longer cache."""
        positions = self.lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
        if self.table is not None:
            page = self.keys.shape[1]
            index = (self.table.gather(1, positions // page), positions % page)
        else:
            slots = torch.arange(k.shape[0], device=k.device) if self.slots is None else self.slots.long()
            index = (slots[:, None], positions)
        self.keys[index], self.values[index] = k, v
        return self._replace(lengths=self.lengths + k.shape[1])


def checked_cache(
    batch: int,
    keys: Tensor,
    values: Tensor,
    new: tuple[Tensor, Tensor] | None,
    lengths: int | Tensor | None,
    slots: Tensor | None,
    table: Tensor | None,
) -> Cache:
    """Check the arguments of a call and return its cache. Numbers are checked only if the host can read them."""
    if table is not None:
        check_table(table, batch)
    if new is not None:
        for name, x in (("k_cache", keys), ("v_cache", values)):
            if any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)):
                raise ShapeError(f"{name}: expected separate memory for each row, because k is given, got shared rows")
    if slots is not None:
        if table is not None:
            raise UnsupportedError("cache_batch_idx: expected None, because block_table is given, got both")
        check_integers("cache_batch_idx", slots, (batch,))
        _check_range("cache_batch_idx", slots, keys.shape[0] - 1)
    elif table is None and keys.shape[0] < batch:
        raise ShapeError(f"k_cache: expected {batch} sequences or more, like q, got {keys.shape[0]}")
    capacity, more = _capacity(keys, table), 0
    if new is not None:
        more = new[0].shape[1] if new[0].ndim > 1 else 0
        for name, x, like in (("k", new[0], keys), ("v", new[1], values)):
            _check_shape(name, x, (batch, more, *like.shape[2:]))
            if x.dtype != like.dtype:
                raise DTypeError(f"{name}: expected {like.dtype} like the cache, got {x.dtype}")
        if lengths is None:
            raise ShapeError("cache_seqlens: expected the number of rows in use, because k is given, got None")
    if lengths is None or isinstance(lengths, int):
        number = capacity if lengths is None else lengths
        if not 0 <= number <= capacity - more:
            raise ShapeError(f"cache_seqlens: expected from 0 to {capacity - more}, got {number}")
        lengths = torch.full((batch,), number, dtype=torch.int32, device=keys.device)
    else:
        check_integers("cache_seqlens", lengths, (batch,))
        _check_range("cache_seqlens", lengths, capacity - more)
    if table is not None:
        table = zero_unused_pages(table, keys, lengths + more)
    return Cache(keys, values, lengths, slots, table)


def spans_after(padding: Tensor, batch: int, capacity: int) -> Spans:
    """The rows after the padding at the start of each sequence."""
    check_integers("cache_leftpad", padding, (batch,))
    _check_range("cache_leftpad", padding, capacity)
    return Spans(padding[:, None, None], capacity)


def gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Copy the pages of each sequence into (batch, rows, heads, dim)."""
    return pages[table].flatten(1, 2)


def zero_unused_pages(table: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
    """Replace entries past the end of each sequence, which may hold anything, by page 0."""
    begins = torch.arange(table.shape[1], device=table.device) * pages.shape[1]
    used = torch.where(begins < lengths[:, None], table, 0)
    _check_range("block_table", used, pages.shape[0] - 1)
    return used.long()


def check_alike(name: str, keys: Tensor, other: str, values: Tensor) -> None:
    """Check that keys and values agree in shape, except for the head dim."""
    if keys.shape != values.shape and keys.shape[:3] != values.shape[:3]:
        wanted = f"expected shape {(*keys.shape[:3], values.shape[3])} like {name}"
        raise ShapeError(f"{other}: {wanted}, got {tuple(values.shape)}")


def check_integers(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Check the dtype and the shape of a tensor of integers."""
    _check_dtype(name, x)
    _check_shape(name, x, shape)


def check_table(table: Tensor, batch: int) -> None:
    _check_dtype("block_table", table)
    if table.ndim != 2 or table.shape[0] != batch:
        raise ShapeError(f"block_table: expected shape ({batch}, pages of a sequence), got {tuple(table.shape)}")


def _capacity(keys: Tensor, table: Tensor | None) -> int:
    return keys.shape[1] * (1 if table is None else table.shape[1])


def _check_dtype(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise DTypeError(f"{name}: expected a torch tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{name}: expected int32 or int64, got {x.dtype}")


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")


def _check_range(name: str, x: Tensor, most: int) -> None:
    if not (x.numel() and readable(x)):
        return
    check_storage({name: x})
    numbers = x.flatten().tolist()  # faster than x.min() and x.max() for this few numbers
    if not 0 <= min(numbers) <= max(numbers) <= most:
        raise ShapeError(f"{name}: expected numbers from 0 to {most}, got {x.tolist()}")
