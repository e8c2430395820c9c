"""BlockMask: a mask_mod of FlexAttention as spans, a band, or, where it has more than 8 spans, a dense mask."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtile.band import FAR, Band, ceil_div
from flashtile.checks.numbers import check_integer
from flashtile.compat.mods import LARGEST, SLAB, Captured, UnknownError, on_pairs
from flashtile.errors import DTypeError, ShapeError
from flashtile.spans import Spans, within

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchMask

MaskMod = Callable[..., Tensor]


class ModError(DTypeError, AssertionError):
    """A function is not a mask_mod; torch raises an AssertionError."""


class Seen(NamedTuple):
    """Which pairs of (queries, keys) are visible: all, those of spans, or those of a mask. A band equals the spans."""

    n_q: int
    n_k: int
    spans: Spans | None = None
    mask: Tensor | None = None
    band: Band | None = None

    def options(self) -> dict[str, Any]:
        """As options of attention()."""
        if self.mask is not None:
            return {"mask": self.mask}
        if self.band is not None:
            return {"band": self.band}
        return {} if self.spans is None else {"spans": self.spans}

    def rows(self, i: Tensor) -> Tensor:
        """Whether these queries see each key; an axis of length 1 stands for any length."""
        if self.mask is not None:
            return self.mask if self.mask.shape[2] == 1 else self.mask[:, :, i]
        if self.spans is None:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=i.device)
        limits = self.spans.limits
        keys = torch.arange(self.n_k, device=i.device)[:, None]
        found: Tensor = within((limits if limits.shape[2] == 1 else limits[:, :, i])[..., None, :, :], keys)
        return found

    def at(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether each of these pairs is visible."""
        if self.mask is not None:
            return take(self.mask, b, h, i, j)
        if self.spans is None:
            return torch.ones_like(i, dtype=torch.bool)
        found: Tensor = within(take(self.spans.limits, b, h, i), j[:, None])
        return found

    def to(self, device: Any) -> Seen:
        spans = None if self.spans is None else Spans.of(self.spans.limits.to(device))
        return self._replace(spans=spans, mask=None if self.mask is None else self.mask.to(device))


def take(x: Tensor, *indices: Tensor) -> Tensor:
    """Index the first axes of x, of which some may have length 1 and stand for any length."""
    return x[tuple(n if x.shape[axis] > 1 else torch.zeros_like(n) for axis, n in enumerate(indices))]


def seen_by(
    visible: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    batch: int,
    heads: int,
    n_q: int,
    n_k: int,
    device: Any,
) -> Seen:
    """Evaluate visible(b, h, i, j) for all pairs, some queries at a time.

    It takes vectors of positions, and gives booleans of four axes, with length 1 where it does not depend on one.
    """
    if 0 in (batch, heads, n_q, n_k):
        return Seen(n_q, n_k)
    b, h, i, j = (torch.arange(n, device=device) for n in (batch, heads, n_q, n_k))
    first = visible(b, h, i[:1], j)
    if first.dtype is not torch.bool:
        raise ModError(f"mask_mod: expected booleans, got {first.dtype}")
    b, h = b[: first.shape[0]], h[: first.shape[1]]
    try:
        spans = Spans.from_function(
            lambda b, h, i, j: visible(*(x.flatten() for x in (b, h, i, j))), len(b), len(h), n_q, n_k, device
        )
    except ShapeError as error:
        return _dense(visible, b, h, i, j, error)
    return _simplified(spans, n_q, n_k)


def _dense(visible: Callable[..., Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor, error: ShapeError) -> Seen:
    reason = str(error).partition("got ")[2].partition(";")[0]  # 9 for batch 0, head 0, query 5
    pairs = len(b) * len(h) * len(i) * len(j)
    if pairs > LARGEST:
        raise ShapeError(
            f"mask_mod: expected at most 8 runs of visible keys per query, because a dense mask would have "
            f"{pairs:.1e} pairs (at most {LARGEST:.1e}), got {reason}"
        )
    warnings.warn(
        f"flex_attention: a dense mask of {len(i)} x {len(j)} is stored, because flashtile takes at most 8 runs of "
        f"visible keys per query, and the mask has {reason}",
        stacklevel=4,
    )
    at_once = max(SLAB // (len(b) * len(h) * len(j)), 1)
    parts = []
    for rows in torch.split(i, at_once):
        found = visible(b, h, rows, j)
        parts.append(found.expand(*found.shape[:2], len(rows), len(j)))
    return Seen(len(i), len(j), mask=torch.cat(parts, 2))


def _simplified(spans: Spans, n_q: int, n_k: int) -> Seen:
    """Keep one of equal batches, heads and queries. Drop spans that hide nothing, and add the band that equals them."""
    limits = spans.limits
    for axis in range(3):
        one = limits.narrow(axis, 0, 1)
        if limits.shape[axis] > 1 and bool((limits == one).all()):
            limits = one
    if limits.shape[:4] == (1, 1, 1, 1) and limits.flatten().tolist() == [0, n_k]:
        return Seen(n_q, n_k)
    return Seen(n_q, n_k, Spans.of(limits.contiguous()), band=_band(limits, n_q, n_k))


def _band(limits: Tensor, n_q: int, n_k: int) -> Band | None:
    """The band that is equal to the spans, if there is one."""
    if limits.shape[:2] != (1, 1) or limits.shape[3] != 1:
        return None
    begin, end = limits.expand(1, 1, n_q, 1, 2)[0, 0, :, 0].long().unbind(-1)
    at = torch.arange(n_q, device=limits.device)
    left, right = (at - begin)[begin > 0], (end - 1 - at)[end < n_k]
    band = Band(int(left.max()) if len(left) else FAR, int(right.max()) if len(right) else FAR)
    b, e = (at - band.left).clip(0, n_k), (at + band.right + 1).clip(0, n_k)
    same = ((b == begin) & (e == end)) | ((b >= e) & (begin == end))
    return band if bool(same.all()) else None


class BlockMask:
    """A mask_mod, evaluated once for (batch, heads, queries, keys), as torch's BlockMask is.

    What torch computes from blocks (sparsity, to_dense, to_string, as_tuple, kv_num_blocks, ...) is computed on demand.
    As in torch, a slice has no mask_mod until one is set. Setting mask_mod or seq_lengths makes the next call evaluate
    the mask again.
    """

    def __init__(
        self,
        mask_mod: MaskMod,
        lead: tuple[int, ...],
        seq_lengths: tuple[int, int],
        device: torch.device,
        BLOCK_SIZE: tuple[int, int],
    ) -> None:
        self._mask_mod, self._lead, self._seq_lengths = mask_mod, lead, tuple(seq_lengths)
        self.device, self.BLOCK_SIZE = device, BLOCK_SIZE
        self._seen: Seen | None = None
        self._captured: Captured | None = None
        self._blocks: TorchMask | None = None

    @classmethod
    def from_torch(cls, block_mask: Any) -> BlockMask:
        """Convert a BlockMask of torch by its mask_mod; again only if the mask_mod or what it has captured changes."""
        mod, lengths = block_mask.mask_mod, tuple(block_mask.seq_lengths)
        known = _KNOWN.get(block_mask)
        same = known is not None and known.mask_mod is mod and known.seq_lengths == lengths
        if same and known is not None and known._captured is not None and not known.is_outdated():
            return known
        lead, device = tuple(block_mask.kv_indices.shape[:-2]), block_mask.kv_indices.device
        found = cls(mod, lead, lengths, device, tuple(block_mask.BLOCK_SIZE))
        found._evaluate(_by_blocks(block_mask))
        _KNOWN[block_mask] = found
        return found

    @classmethod
    def from_kv_blocks(cls, *blocks: Any, **options: Any) -> BlockMask:
        """From blocks and a mask_mod that says the same as they do; arguments are those of torch's."""
        from torch.nn.attention.flex_attention import BlockMask as TorchMask

        found = TorchMask.from_kv_blocks(*blocks, **options)
        return cls.from_torch(found)

    @property
    def mask_mod(self) -> MaskMod:
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: MaskMod) -> None:
        self._mask_mod, self._seen = mask_mod, None

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self._seq_lengths  # type: ignore[return-value]

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        self._seq_lengths, self._seen = tuple(lengths), None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._lead, *self.seq_lengths)

    @property
    def seen(self) -> Seen:
        """What is visible."""
        if self._seen is None:
            return self._evaluate(lambda *at: on_pairs(self._mask_mod, *at))
        return self._seen

    @property
    def spans(self) -> Spans | None:
        """The spans; None if every query sees all keys, or one has more than 8."""
        return self.seen.spans

    def is_outdated(self) -> bool:
        """Whether something that the mask_mod has captured is known to have changed since it was evaluated."""
        return self._captured is not None and not self._captured.is_unchanged(self._mask_mod)

    def _evaluate(self, visible: Callable[..., Tensor]) -> Seen:
        batch, heads = self._batch_and_heads()
        self._seen = seen_by(visible, batch, heads, *self.seq_lengths, self.device)
        try:
            self._captured = Captured(self._mask_mod)
        except UnknownError:
            self._captured = None
        return self._seen

    def _batch_and_heads(self) -> tuple[int, ...]:
        return (1, 1, *self._lead)[-2:]

    def __getitem__(self, index: Any) -> BlockMask:
        blocks = self._torch_mask()[index]
        found = BlockMask(
            sliced_mask_mod, tuple(blocks.kv_indices.shape[:-2]), self.seq_lengths, self.device, self.BLOCK_SIZE
        )
        found._blocks = blocks
        return found

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The upper left corner, as torch does."""
        batch, heads = self._batch_and_heads()
        return create_block_mask(self.mask_mod, batch, heads, new_q_len, new_kv_len, self.device, self.BLOCK_SIZE)

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def to(self, device: Any) -> BlockMask:
        """On another device; what the mask_mod has captured stays where it is, as in torch."""
        found = BlockMask(self.mask_mod, self._lead, self.seq_lengths, torch.device(device), self.BLOCK_SIZE)
        found._seen = None if self._seen is None else self._seen.to(device)
        found._blocks = None if self._blocks is None else self._blocks.to(device)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """A copy evaluates its mask_mod when it is used."""
        return {**self.__dict__, "_seen": None, "_captured": None}

    def __repr__(self) -> str:
        name = getattr(self.mask_mod, "__name__", self.mask_mod)
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, mask_mod={name})"

    def __str__(self) -> str:
        return str(self._torch_mask())

    def __getattr__(self, name: str) -> Any:
        """Get from torch's BlockMask whatever it computes from the blocks."""
        if name.startswith("__") or name in ("_blocks", "_seen", "_lead"):
            raise AttributeError(name)
        return getattr(self._torch_mask(), name)

    def _torch_mask(self) -> TorchMask:
        """The same mask as a BlockMask of torch, from the number of visible pairs in each block."""
        if self._blocks is None:
            from torch.nn.attention.flex_attention import BlockMask as TorchMask

            counts = self._counts()
            full = counts == self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1]
            self._blocks = TorchMask.from_kv_blocks(
                *_ordered((counts > 0) & ~full),
                *_ordered(full),
                BLOCK_SIZE=self.BLOCK_SIZE,
                mask_mod=self.mask_mod,
                seq_lengths=self.seq_lengths,
            )
        self._blocks.mask_mod, self._blocks.seq_lengths = self._mask_mod, self.seq_lengths
        return self._blocks

    def _counts(self) -> Tensor:
        (rows, cols), (n_q, n_k) = self.BLOCK_SIZE, self.seq_lengths
        batch, heads = self._batch_and_heads()
        at_once = max(SLAB // max(batch * heads * n_k * rows, 1), 1) * rows
        parts = [torch.zeros(batch, heads, 0, ceil_div(n_k, cols), dtype=torch.int64, device=self.device)]
        for i in torch.split(torch.arange(n_q, device=self.device), at_once):
            found = self.seen.rows(i)
            found = found.expand(batch, heads, len(i), n_k)
            found = pad(found, (0, -n_k % cols, 0, -len(i) % rows))
            blocks = found.reshape(batch, heads, ceil_div(len(i), rows), rows, ceil_div(n_k, cols), cols)
            parts.append(blocks.sum((3, 5)))
        return torch.cat(parts, 2)


_KNOWN: weakref.WeakKeyDictionary[Any, BlockMask] = weakref.WeakKeyDictionary()


def sliced_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The mask_mod of a slice."""
    raise RuntimeError(
        "Cannot use mask_mod from a sliced BlockMask: set it, and seq_lengths, as it should be for the slice"
    )


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Like torch's: mask_mod(b, h, q_idx, kv_idx) is True where a query may attend.

    It is evaluated for all pairs, some queries at a time, and stored as spans, whose memory grows with the number of
    queries. As in torch, without B or H it is evaluated for index 0 and applies to all. The last four arguments, and
    BLOCK_SIZE, do not affect what is computed.
    """
    if not callable(mask_mod) or _arguments(mask_mod) != 4:
        raise ModError(f"mask_mod: expected a function of (b, h, q_idx, kv_idx), got {mask_mod}")
    if _compile:
        warnings.warn("create_block_mask: _compile has no effect here", DeprecationWarning, stacklevel=2)
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    block = tuple(check_integer("BLOCK_SIZE", n, 1, None) for n in block)
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = torch.empty(0, device=device).device  # with its index
    lead = tuple(1 if n is None else check_integer(name, n, 0, None) for name, n in (("B", B), ("H", H)))
    lengths = (check_integer("Q_LEN", Q_LEN, 0, None), check_integer("KV_LEN", KV_LEN, 0, None))
    found = BlockMask(mask_mod, lead, lengths, device, (block[0], block[1]))
    found._evaluate(lambda *at: on_pairs(mask_mod, *at))
    return found


def _arguments(function: Any) -> int:
    """How many arguments a function needs."""
    parameters = inspect.signature(function).parameters.values()
    return sum(x.default is x.empty for x in parameters)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and the order of all blocks, those of the row first."""
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32), order.to(torch.int32)


def _by_blocks(block_mask: Any) -> Callable[..., Tensor]:
    """The mask_mod of a BlockMask of torch, checked against its blocks, outside which torch's kernels skip it."""
    rows, cols = block_mask.BLOCK_SIZE
    listed = block_mask.to_dense()
    listed = listed[(None,) * (4 - listed.ndim)] > 0
    n_q, n_k = block_mask.seq_lengths
    if listed.shape[2] * rows < n_q or listed.shape[3] * cols < n_k:
        raise ShapeError(f"block_mask: expected blocks for its seq_lengths {(n_q, n_k)}, got {tuple(listed.shape)}")
    full = None
    if block_mask.full_kv_num_blocks is not None:
        from torch.nn.attention.flex_attention import BlockMask as TorchMask

        full = TorchMask.from_kv_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices).to_dense()
        full = full[(None,) * (4 - full.ndim)] > 0

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found: Tensor = on_pairs(block_mask.mask_mod, b, h, i, j)
        if found.dtype is not torch.bool:
            return found
        at = (..., (i // rows)[:, None], j // cols)
        wrong = (found & ~listed[at]).any()
        if full is not None:
            wrong |= (full[at] & ~found).any()
        if wrong:
            raise ShapeError(
                "block_mask: expected a mask_mod that agrees with the blocks, got one that sees pairs outside them, "
                "or not all pairs of a full one; create_block_mask() needs only a mask_mod"
            )
        return found

    return visible
