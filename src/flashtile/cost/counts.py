"""Counts: tiles, pairs and bytes of a problem, summed over its sequences and heads."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.band import Kind, ceil_div
from flashtile.cost import traffic
from flashtile.cost.tiling import Tiling
from flashtile.numerics.dtypes import ITEMSIZE
from flashtile.numerics.visibility import Visible
from flashtile.problem import Problem


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
    cut_bytes: int = 0

    @classmethod
    def of(cls, p: Problem, tile: Tiling) -> "Counts":
        counts = cls(Counter(dict.fromkeys(Kind, 0)))
        size, wide, width = ITEMSIZE[p.dtype], ITEMSIZE[p.accumulator], p.dim + p.dim_v
        for n_q, n_k, sequences in _lengths(p):
            times = len(sequences)
            counts.scores += times * p.heads * n_q * n_k
            counts.rows += times * p.heads * n_q
            rows = times * p.heads * n_q * (p.dim * size + p.dim_v * ITEMSIZE[p.out_dtype] + wide)  # Q, O and L
            seen = loaded = 0
            for visible, heads, grids in _planes(p, n_q, n_k, sequences[0], tile.heads):
                for kind, n in traffic.tile_counts(visible, n_q, n_k, tile.rows, tile.keys).items():
                    counts.tiles[kind] += times * grids * n
                counts.pairs += times * heads * traffic.visible_pairs(visible, n_q, n_k)
                loaded += times * grids * traffic.keys_visited(visible, n_q, n_k, tile.rows, tile.keys)
                seen += times * heads * traffic.keys_seen(visible, n_q, n_k)
            kv_bytes = times * p.kv_heads * n_k * width * size
            counts.tile_bytes += rows + loaded * width * size
            counts.least_bytes += rows + seen * width * size // p.group
            counts.standard_bytes += times * p.heads * (4 * n_q * n_k + n_q * width) * size + kv_bytes
            counts.kv_bytes += kv_bytes
            if p.spans is not None:
                heads, spans = p.spans.shape[1], p.spans.shape[3]
                counts.cut_bytes += times * heads * ceil_div(n_q, tile.rows) * spans * 4 * ITEMSIZE["float32"]
        return counts


def _lengths(p: Problem) -> Iterator[tuple[int, int, list[int]]]:
    """Sequences that cost the same, with their numbers of queries and keys: those of the same length and spans."""
    alike: dict[tuple[int, ...], list[int]] = {}
    own_spans = p.spans is not None and p.spans.shape[0] > 1
    for s, lengths in enumerate(zip(p.q_lengths, p.k_lengths, strict=True)):
        alike.setdefault((*lengths, s) if own_spans else lengths, []).append(s)
    return ((key[0], key[1], sequences) for key, sequences in alike.items())


def _planes(p: Problem, n_q: int, n_k: int, sequence: int, together: int) -> Iterator[tuple[Visible, int, int]]:
    """What the heads of a sequence see; for how many heads, and for how many grids of tiles, that counts.

    together: query heads that share a tile. If each has its own spans, the first of them counts for all.
    """
    band = p.band_for(n_q, n_k)
    if p.spans is None or p.spans.shape[1] == 1:
        yield p.visible(band, sequence, 0, n_q), p.heads, p.kv_heads * ceil_div(p.group, together)
        return
    for head in range(p.heads):
        yield p.visible(band, sequence, head, n_q), 1, head % p.group % together == 0


def block_bytes(p: Problem, tile: Tiling) -> dict[str, int]:
    rows, size, wide = tile.rows * tile.heads, ITEMSIZE[p.dtype], ITEMSIZE[p.accumulator]
    moved = {"Q": rows * p.dim * size, "K": tile.keys * p.dim * size, "V": tile.keys * p.dim_v * size}
    return moved | {"S": tile.rows_at_once * tile.keys * wide, "O": rows * p.dim_v * wide}
