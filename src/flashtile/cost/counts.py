"""Counts: tiles, pairs and bytes of a problem, summed over its sequences and heads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashtile.band import Kind, ceil_div, cuts
from flashtile.cost import traffic
from flashtile.cost.tiling import Tiling
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.problem import Problem

if TYPE_CHECKING:
    pass


@dataclass(slots=True)
class Counts:
    """Sums over the sequences and heads of a problem."""

    tiles: Counter[Kind]
    pairs: int = 0
    scores: int = 0
    rows: int = 0
    tile_bytes: int = 0
    least_bytes: int = 0
    standard_bytes: int = 0
    kv_bytes: int = 0

    @classmethod
    def of(cls, p: Problem, tile: Tiling) -> Counts:
        counts = cls(Counter(dict.fromkeys(Kind, 0)))
        size, wide, width = ITEMSIZE[p.dtype], ITEMSIZE[p.accumulator], p.dim + p.dim_v
        # Sequences of the same length cost the same: each length is counted once.
        for (n_q, n_k), times in Counter(zip(p.q_lengths, p.k_lengths, strict=True)).items():
            band, heads, kv_heads = p.band_for(n_q, n_k), times * p.heads, times * p.kv_heads
            grids = kv_heads * ceil_div(p.group, tile.heads)
            for kind, n in traffic.tile_counts(band, n_q, n_k, tile.rows, tile.keys).items():
                counts.tiles[kind] += grids * n
            counts.pairs += heads * traffic.visible_pairs(band, n_q, n_k)
            counts.scores += heads * n_q * n_k
            counts.rows += heads * n_q
            rows = heads * n_q * (p.dim * size + p.dim_v * ITEMSIZE[p.out_dtype] + wide)  # Q, O and L
            seen = cuts(band, 0, n_q, n_k, 1) if n_q else None
            kv_seen = 0 if seen is None else (seen.end - seen.begin) * width * size
            loaded = grids * traffic.keys_visited(band, n_q, n_k, tile.rows, tile.keys)
            counts.tile_bytes += rows + loaded * width * size
            counts.least_bytes += rows + kv_heads * kv_seen
            counts.standard_bytes += heads * (4 * n_q * n_k + n_q * width) * size + kv_heads * n_k * width * size
            counts.kv_bytes += kv_heads * n_k * width * size
        return counts


def block_bytes(p: Problem, tile: Tiling) -> dict[str, int]:
    rows, size, wide = tile.rows * tile.heads, ITEMSIZE[p.dtype], ITEMSIZE[p.accumulator]
    moved = {"Q": rows * p.dim * size, "K": tile.keys * p.dim * size, "V": tile.keys * p.dim_v * size}
    return moved | {"S": tile.rows_at_once * tile.keys * wide, "O": rows * p.dim_v * wide}
