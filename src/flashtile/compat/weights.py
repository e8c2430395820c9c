"""Attention weights as flash_attn returns them for tests: an N x N matrix, negative where dropped.

attention() returns weights if v is an identity matrix: with dropout, those that are 0 were dropped.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention, attention_packed
from flashtile.checks.shapes import MAX_DIM

ROUND = 128  # lengths are rounded up to multiples of this


@torch.no_grad()
def dense(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Weights of q and k, (batch, heads, rows, dim), as (batch, heads, queries, keys), rounded up and padded with 0."""
    positions = torch.arange(k.shape[2], device=k.device)

    def weights(begin: int, end: int, options: dict[str, Any]) -> Tensor:
        v = _diagonal(positions, begin, end, k).expand(*k.shape[:2], -1, -1)
        out: Tensor = attention(q, k, v, layout="bhnd", **options)
        return out

    found = q.new_zeros(*q.shape[:2], _rounded(q.shape[2]), _rounded(k.shape[2]))
    for begin, end, part in _signed(weights, k.shape[2], options):
        found[:, :, : q.shape[2], begin:end] = part
    return found


@torch.no_grad()
def packed(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, options: dict[str, Any]
) -> Tensor:
    """Weights of packed q and k, (rows, heads, dim), as (sequences, heads, most queries, most keys), rounded up."""
    (of_q, at_q), (_, at_k) = _positions(cu_q, len(q)), _positions(cu_k, len(k))

    def weights(begin: int, end: int, options: dict[str, Any]) -> Tensor:
        v = _diagonal(at_k, begin, end, k)[:, None].expand(-1, k.shape[1], -1)
        out: Tensor = attention_packed(q, k, v, cu_q, cu_k, **options)
        return out

    n_q, n_k = (max([most, *cu.diff().tolist()]) for most, cu in ((most_q, cu_q), (most_k, cu_k)))
    found = q.new_zeros(len(cu_q) - 1, q.shape[1], _rounded(n_q), _rounded(n_k))
    for begin, end, part in _signed(weights, n_k, options):
        found[of_q, :, at_q, begin:end] = part
    return found


def _signed(
    weights: Callable[[int, int, dict[str, Any]], Tensor], n_k: int, options: dict[str, Any]
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ranges of keys and their weights, negated where dropped."""
    whole = {name: x for name, x in options.items() if name not in ("dropout", "seed")}
    for begin in range(0, n_k, MAX_DIM):
        end = min(begin + MAX_DIM, n_k)
        every, kept = weights(begin, end, whole), weights(begin, end, options)
        yield begin, end, torch.where(kept == 0, -every, every)


def _diagonal(positions: Tensor, begin: int, end: int, like: Tensor) -> Tensor:
    """Ones where a row's position equals the column's, (rows, end - begin)."""
    return (positions[:, None] == torch.arange(begin, end, device=positions.device)).to(like.dtype)


def _positions(starts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The sequence of each row, and its position in it."""
    lengths = starts.long().diff()
    sequence = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
    return sequence, torch.arange(rows, device=starts.device) - starts.long()[sequence]


def _rounded(n: int) -> int:
    return -(-n // ROUND) * ROUND
